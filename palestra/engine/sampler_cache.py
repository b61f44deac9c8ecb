"""Weights kept for sampling: in memory while there is room, in a spool file when not, back at their next use.

Owns: kept samplers, adapters opened from checkpoint folders, their memory and files. Never touches: samples.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from palestra.engine.backend import ComputeBackend, Weights
from palestra.engine.files import (
    FileDamaged,
    FileThread,
    id_of,
    name_in_state,
    name_of,
    own_folder,
    read_tensors,
    write_tensors,
)
from palestra.engine.queues import ModelTable, QueuedModel
from palestra.engine.uploads import FileUploads, Upload
from palestra.model import AdapterError, DataError
from palestra.types import LoraConfig
from palestra.types.engine import FileArea, KeptSampler, SamplerSpooled

log = logging.getLogger(__name__)

FORMAT = 1
SUFFIX = ".sampler"
RETRY_S = 10.0  # after the spool could not be written


class SpoolHeader(msgspec.Struct, kw_only=True):
    format: int
    sampler_id: str
    lora: LoraConfig


@dataclass(slots=True, eq=False)
class CachedSampler:
    sampler_id: str
    model_id: str | None = None
    """None if it came from a file, since it need not be written again."""
    lora: LoraConfig | None = None
    weights: Weights | None = None
    row: NDArray[np.float32] | None = None
    """The copy on its way to the file."""
    has_file: bool = False


@dataclass(slots=True, eq=False)
class OpenedSampler:
    folder: str
    version: tuple[int, int]
    """Version of the folder: another one may have taken its name."""
    weights: Weights


class SamplerCopies:
    """Copies of kept samplers at the server, for a worker on another machine. They are sent as soon as they are files,
    before the snapshots that rely on them."""

    def __init__(self, uploads: FileUploads, copied: set[str]):
        """`copied`: names of files that are there."""
        self.uploads, self._copied = uploads, copied

    def add_missing(self, folder: Path) -> None:
        """Adds the files that an earlier process has not sent."""
        for file in sorted(folder.glob("*" + SUFFIX)):
            if file.name not in self._copied:
                self.add(file)

    def add(self, file: Path) -> None:
        """Adds a file to those that are sent until the server has them: a snapshot that is sent after it may rely on
        it."""
        self.uploads.add(Upload(FileArea.STATE, f"samplers/{file.name}", lambda _: None, file, is_needed=True))

    def drop(self, file: Path) -> None:
        self.uploads.drop([f"samplers/{file.name}"])


class SamplerCache:
    def __init__(
        self,
        backend: ComputeBackend,
        files: FileThread,
        folder: Path,
        *,
        memory_bytes: int,
        find_folder: Callable[[str], Path] = Path,
        copies: SamplerCopies | None = None,
    ):
        """`find_folder` returns where a checkpoint's folder is on this machine."""
        self.backend, self.files, self.folder = backend, files, own_folder(folder)
        self.memory_bytes, self._find_folder, self._copies = memory_bytes, find_folder, copies
        self.kept: dict[str, CachedSampler] = {}
        for file in self.folder.glob("*" + SUFFIX):
            sampler_id = id_of(file.name.removesuffix(SUFFIX))
            self.kept[sampler_id] = CachedSampler(sampler_id, has_file=True)
        self._by_model: dict[str, dict[str, CachedSampler]] = {}
        """Those that a snapshot of their model has to care for."""
        self._opened: dict[str, OpenedSampler] = {}
        self._used: OrderedDict[CachedSampler | OpenedSampler, None] = OrderedDict()
        """Those in memory, least recently used first."""
        self.may_have_grown = False
        """Since `make_room`: weights were read, or a model changed that samplers shared memory with."""
        self._writing_bytes = 0
        self._retry_at = 0.0
        self.on_spooled: Callable[[SamplerSpooled], None] = lambda _: None
        """Called when the file of a sampler is on disk."""

    # Coming and going

    def keep(self, sampler_id: str, model: QueuedModel) -> None:
        """Freezes a model's weights. One that is there already comes from an earlier life of this request."""
        if sampler_id in self.kept:
            return
        try:
            name_of(sampler_id)
        except ValueError as e:
            raise DataError(str(e)) from None
        kept = CachedSampler(sampler_id, model.model_id, model.lora, self.backend.freeze(model.weights))
        self.kept[sampler_id] = self._by_model.setdefault(model.model_id, {})[sampler_id] = kept
        self._used[kept] = None

    def drop(self, sampler_ids: list[str]) -> None:
        for sampler_id in sampler_ids:
            kept = self.kept.pop(sampler_id, None)
            if kept is None:
                continue
            if kept.model_id is not None:
                self._by_model[kept.model_id].pop(sampler_id, None)
            self._unload(kept)
            if kept.has_file or kept.row is not None:  # the deletion comes after a writing that is under way
                file = self._file(sampler_id)
                self.files.submit(lambda file=file: file.unlink(missing_ok=True), _log_error)
                if self._copies is not None:
                    self._copies.drop(file)

    def secure(self, model: QueuedModel) -> dict[str, Path | None]:
        """Returns, before a snapshot, a file for every sampler of the model; None for those that are its weights of
        today."""
        found: dict[str, Path | None] = {}
        today = self.backend.weights_key(model.weights)
        for kept in self._by_model.get(model.model_id, {}).values():
            if kept.weights is not None and self.backend.weights_key(kept.weights) == today and not kept.has_file:
                found[kept.sampler_id] = None
            else:
                self._write(kept)
                found[kept.sampler_id] = self._file(kept.sampler_id)
        return found

    def orphan(self, model_id: str) -> None:
        """The model goes, and its snapshot with it: what it kept needs files of its own."""
        self.may_have_grown = True
        for kept in self._by_model.pop(model_id, {}).values():
            self._write(kept)
            kept.model_id = None

    # Use

    def find(self, sampler_id: str) -> Weights | None:
        """The weights of a kept sampler, read back if need be; None if there is no such sampler."""
        kept = self.kept.get(sampler_id)
        if kept is None:
            return None
        if kept.weights is None:
            if kept.row is None:
                kept.lora, row = self._read(kept)
            else:
                row = kept.row
            assert kept.lora is not None
            kept.weights = self.backend.place_row(kept.lora, row)
        self._touch(kept)
        return kept.weights

    def get(self, sampler_id: str) -> Weights:
        found = self.find(sampler_id)
        if found is None:
            raise DataError(
                f"sampler {sampler_id!r} no longer exists: its session ended, or its weights were not stored"
            )
        return found

    def is_awaited(self, sampler: KeptSampler, table: ModelTable) -> bool:
        """Whether it does not exist yet, because its model has not come to the request that makes it."""
        model = table.models.get(sampler.model_id)
        return sampler.sampler_id not in self.kept and model is not None and model.applied_seq < sampler.seq_id

    def close(self, folder: str) -> None:
        """Frees what was opened from a folder that goes."""
        if (opened := self._opened.get(folder)) is not None:
            self._unload(opened)

    def open(self, folder: str) -> Weights:
        """A checkpoint folder. It can be read again, so it is never spooled."""
        if self._copies is not None and (known := self._opened.get(folder)) is not None:
            self._touch(known)  # on another machine no folder takes the name of another, and to find one may be a fetch
            return known.weights
        here = self._find_folder(folder)
        try:
            status = here.stat()
        except OSError as e:
            raise AdapterError(f"checkpoint {folder} no longer exists ({e.strerror})") from None
        version = (status.st_ino, status.st_mtime_ns)
        opened = self._opened.get(folder)
        if opened is not None and opened.version != version:
            self._unload(opened)
            opened = None
        if opened is None:
            opened = self._opened[folder] = OpenedSampler(folder, version, self.backend.open_folder(str(here)))
        self._touch(opened)
        return opened.weights

    # Memory

    @property
    def bytes_in_memory(self) -> int:
        sizes = {self.backend.weights_key(e.weights): self.backend.own_bytes(e.weights) for e in self._used}
        return sum(sizes.values()) + self._writing_bytes

    def make_room(self) -> None:
        """Between quanta. Waits for the disk only when it is far behind."""
        if not self.may_have_grown:
            return
        self.may_have_grown = False
        own = [(e, self.backend.own_bytes(e.weights)) for e in self._used]
        own = [(e, size) for e, size in own if size]
        keys = Counter(self.backend.weights_key(e.weights) for e, _ in own)
        used = sum({self.backend.weights_key(e.weights): size for e, size in own}.values())
        for entry, size in own:
            if used <= self.memory_bytes or time.monotonic() < self._retry_at:
                break
            key = self.backend.weights_key(entry.weights)
            if isinstance(entry, CachedSampler):
                self._write(entry)
            self._unload(entry)
            keys[key] -= 1
            used -= 0 if keys[key] else size
        while self._writing_bytes > self.memory_bytes and self.files.pending:
            self.files.wait()

    def _touch(self, entry: CachedSampler | OpenedSampler) -> None:
        self.may_have_grown = True
        self._used[entry] = None
        self._used.move_to_end(entry)

    def _unload(self, entry: CachedSampler | OpenedSampler) -> None:
        self._used.pop(entry, None)
        if isinstance(entry, OpenedSampler):
            self._opened.pop(entry.folder, None)
            self.backend.free(entry.weights)
        elif entry.weights is not None:
            self.backend.free(entry.weights)
            entry.weights = None

    # Files

    def _file(self, sampler_id: str) -> Path:
        return self.folder / (name_of(sampler_id) + SUFFIX)

    def _write(self, kept: CachedSampler) -> None:
        """Writes the file once, from a copy."""
        if kept.has_file or kept.row is not None:
            return
        assert kept.lora is not None
        row = kept.row = self.backend.frozen_row(kept.weights)
        header = SpoolHeader(format=FORMAT, sampler_id=kept.sampler_id, lora=kept.lora)
        metadata, file = msgspec.json.encode(header).decode(), self._file(kept.sampler_id)
        self._writing_bytes += row.nbytes

        def then(_: None, error: Exception | None) -> None:
            self._writing_bytes -= row.nbytes
            kept.row, kept.has_file = None, error is None
            if error is None and self.kept.get(kept.sampler_id) is kept:
                self.on_spooled(self._spooled(kept))
                if self._copies is not None:
                    self._copies.add(file)
            if error is not None and self.kept.get(kept.sampler_id) is kept:
                log.error("spool_failed sampler=%s error=%r", kept.sampler_id, error)
                self._retry_at = time.monotonic() + RETRY_S
                if kept.weights is None and kept.lora is not None:
                    kept.weights = self.backend.place_row(kept.lora, row)
                    self._touch(kept)

        self.files.submit(lambda: write_tensors(file, {"weights": row}, metadata), then)

    def spooled(self) -> list[SamplerSpooled]:
        """All that have a file."""
        return [self._spooled(kept) for kept in self.kept.values() if kept.has_file]

    def _spooled(self, kept: CachedSampler) -> SamplerSpooled:
        return SamplerSpooled(sampler_id=kept.sampler_id, file=name_in_state(self._file(kept.sampler_id)))

    def _read(self, kept: CachedSampler) -> tuple[LoraConfig, NDArray[np.float32]]:
        try:
            tensors, metadata = read_tensors(self._file(kept.sampler_id))
            return msgspec.json.decode(metadata, type=SpoolHeader).lora, tensors["weights"]
        except (FileDamaged, msgspec.MsgspecError, KeyError) as e:
            log.error("sampler_unusable sampler=%s error=%r", kept.sampler_id, e)
            lost = f"the weights of sampler {kept.sampler_id!r} are lost (a damaged file); save them again"
            raise FileDamaged(lost) from None


def _log_error(_: None, error: Exception | None) -> None:
    if error is not None:
        log.error("file_work_failed error=%r", error)
