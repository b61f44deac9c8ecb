"""Snapshots: a model as it is between two requests, in one file that is whole or absent. Two are kept of each model:
a new one takes the place of the older, and if the newest is damaged, the other serves.

Owns: the format, when one is due, coming back from them. Never touches: computing, the journal (the server's).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from palestra.engine.backend import ComputeBackend, ModelImage
from palestra.engine.files import (
    BAD,
    SECOND,
    SNAPSHOT,
    FileDamaged,
    FileThread,
    id_of,
    name_in_state,
    own_folder,
    read_metadata,
    read_tensors,
    set_aside,
    snapshot_name,
    write_tensors,
)
from palestra.engine.queues import KEPT_SNAPSHOTS, NO_SNAPSHOT, ModelTable, QueuedModel
from palestra.engine.sampler_cache import SamplerCache
from palestra.engine.snapshot_uploads import SnapshotUploads
from palestra.engine.stats import Counters
from palestra.model import ModelError
from palestra.model.lora.adapter_files import weights_setting
from palestra.types import LoraConfig
from palestra.types.engine import FromWorker, Snapshotted, Trained
from palestra.util.renamed import with_new_keys

T = TypeVar("T")

log = logging.getLogger(__name__)

FORMAT = 1
UNSTORED = "unstored"
MAX_IN_FLIGHT = 4  # each is a copy of its model until it is on disk
SCAN_EVERY_S = 0.1
REST = 4.0
"""From one snapshot of a model to the next are at least this many times as many seconds as the last took to write: the
file thread has other files too, and snapshots of an adapter for hundreds of experts are gigabytes."""


class SamplerPlace(StrEnum):
    TODAY = "today"
    """It is the model's weights in this very snapshot."""
    FILE = "file"


class SnapshotHeader(msgspec.Struct, kw_only=True):
    format: int
    model_id: str
    lora: LoraConfig
    steps: int
    seq_id: int
    samplers: dict[str, SamplerPlace]
    weights: str = ""
    """What the base's weights were kept in; empty in files from before they could differ."""
    gradient_shards: int = 1
    tensor: int = 1
    """Processes that computed every layer together."""
    context: int = 1
    """Processes that computed every micro-batch together."""


class StateRefused(Exception):
    """The state folder has models that would go on at other bits: their base was in another form, or something was
    summed in another order."""


class Snapshots:
    def __init__(
        self,
        backend: ComputeBackend,
        table: ModelTable,
        sampler_cache: SamplerCache,
        files: FileThread,
        counters: Counters,
        send: Callable[[FromWorker], None],
        folder: Path,
        *,
        every_s: float,
        every_bytes: int,
        allow_weights_mismatch: bool = False,
        allow_shard_mismatch: bool = False,
        allow_tensor_mismatch: bool = False,
        allow_context_mismatch: bool = False,
        copies: SnapshotUploads | None = None,
    ):
        self.backend, self.table, self.sampler_cache, self.files = backend, table, sampler_cache, files
        self.counters, self._send, self.folder = counters, send, own_folder(folder)
        self.every_s, self.every_bytes, self.copies = every_s, every_bytes, copies
        self.allow_weights_mismatch, self.allow_shard_mismatch = allow_weights_mismatch, allow_shard_mismatch
        self.allow_tensor_mismatch, self.allow_context_mismatch = allow_tensor_mismatch, allow_context_mismatch
        self._changed: dict[str, QueuedModel] = {}
        self._in_flight = 0
        self._scan_at = 0.0

    # When

    def on_applied(self, model: QueuedModel) -> None:
        """The model is between two requests."""
        if model.needs_snapshot:
            self._changed[model.model_id] = model
            self._take_if_due(model, time.monotonic())

    def take_due(self) -> None:
        now = time.monotonic()
        if self._changed and now >= self._scan_at:
            self._scan_at = now + SCAN_EVERY_S
            for model in list(self._changed.values()):
                self._take_if_due(model, now)

    @property
    def next_s(self) -> float:
        """Returns for how long nothing will be due, if nothing happens."""
        if not self._changed or self._in_flight >= MAX_IN_FLIGHT:
            return inf
        due = min((self._due_at(m) for m in self._changed.values() if self._can_take(m)), default=inf)
        return max(due, self._scan_at) - time.monotonic()

    def _due_at(self, model: QueuedModel) -> float:
        rest_s = REST * model.snapshot_write_s
        every_s = 0.0 if model.bytes_since_snapshot >= self.every_bytes else self.every_s
        return model.snapshot_at + max(every_s, rest_s)

    def _can_take(self, model: QueuedModel) -> bool:
        return model.is_between_requests and not model.is_snapshotting

    def _take_if_due(self, model: QueuedModel, now: float) -> None:
        if self._in_flight < MAX_IN_FLIGHT and self._can_take(model) and now >= self._due_at(model):
            self.take(model)

    # How

    def take(self, model: QueuedModel) -> None:
        """Copied here and now, written in the file thread, in the place of the older one."""
        image, places = self.backend.image(model.weights), self.sampler_cache.secure(model)
        header = SnapshotHeader(
            format=FORMAT,
            model_id=model.model_id,
            lora=model.lora,
            steps=image.steps,
            seq_id=model.applied_seq,
            weights=self.backend.card.weights,
            gradient_shards=self.backend.gradient_shards,
            tensor=self.backend.tensor,
            context=self.backend.context,
            samplers={n: SamplerPlace.TODAY if file is None else SamplerPlace.FILE for n, file in places.items()},
        )
        unstored = self.table.unstored_of(model)
        needed = [file for file in places.values() if file is not None]
        number = model.snapshots.index(model.covered_seq)
        self._changed.pop(model.model_id, None)
        model.is_snapshotting = True
        model.snapshot_at, model.bytes_since_snapshot = time.monotonic(), 0
        self._in_flight += 1

        def work() -> None:
            for file in needed:
                if not file.exists():
                    raise FileNotFoundError(f"{file}: a sampler of this model could not be written")
            results = np.frombuffer(msgspec.msgpack.encode(unstored), np.uint8)
            metadata, start = msgspec.json.encode(header).decode(), time.monotonic()
            write_tensors(self._file(header.model_id, number), {**image.tensors, UNSTORED: results}, metadata)
            model.snapshot_write_s = time.monotonic() - start

        def then(_: None, error: Exception | None) -> None:
            self._in_flight -= 1
            model.is_snapshotting = False
            if model.is_dropped:
                return
            if error is None:
                model.snapshots[number] = header.seq_id
                self.counters.snapshots += 1
                self._send(self._report(model, number))
                if self.copies is not None:
                    self.copies.on_snapshot(model)
            else:
                log.error("snapshot_failed model=%s seq=%d error=%r", model.model_id, header.seq_id, error)
            if model.needs_snapshot:
                self._changed[model.model_id] = model

        self.files.submit(work, then)

    def take_all(self) -> None:
        """Takes snapshots, before the end, of every model that changed, as of its last whole request."""
        while self.files.pending:  # a save may be a client's last request
            self.files.wait()
        for model in list(self.table.models.values()):
            if model.running is not None and model.running.train:
                self.backend.undo_pass(model.weights, model.running.begun)
            model.running = None
            if model.is_changed:
                self.take(model)
        while self.files.pending:
            self.files.wait()

    def drop(self, model: QueuedModel) -> None:
        """Drops a model's snapshots in the file thread, after one that is under way."""
        self._changed.pop(model.model_id, None)
        files = [self._file(model.model_id, number) for number in range(KEPT_SNAPSHOTS)]

        def work() -> None:
            for file in files:
                file.unlink(missing_ok=True)
                file.with_name(file.name + BAD).unlink(missing_ok=True)

        def then(result: None, error: Exception | None) -> None:
            _log_error(result, error)
            if self.copies is not None:  # behind the files of its samplers, which had their weights from these
                self.copies.drop(model)

        self.files.submit(work, then)

    def newest(self) -> list[Snapshotted]:
        """Returns the newest snapshot of each model that has one."""
        models = (model for model in self.table.models.values() if max(model.snapshots) != NO_SNAPSHOT)
        return [self._report(model, model.snapshots.index(max(model.snapshots))) for model in models]

    def _report(self, model: QueuedModel, number: int) -> Snapshotted:
        return Snapshotted(
            model_id=model.model_id,
            seq_id=model.snapshots[number],
            covered_seq=model.settled_seq,
            file=name_in_state(self._file(model.model_id, number)),
        )

    # Coming back

    def restore(self) -> None:
        names = {file.name.removesuffix(SNAPSHOT).removesuffix(SECOND) for file in self.folder.glob("*" + SNAPSHOT)}
        for model_id in sorted(map(id_of, names)):
            self._restore_model(model_id)

    def _restore_model(self, model_id: str) -> None:
        """Restores a model from the newest of its snapshots that is whole."""
        files = [self._file(model_id, number) for number in range(KEPT_SNAPSHOTS)]
        seqs = [self._unless_damaged(file, lambda file: _header(read_metadata(file)).seq_id) for file in files]
        found = [(seq, number) for number, seq in enumerate(seqs) if seq is not None]
        for _, number in found:
            header = _header(read_metadata(files[number]))
            self._require_same_weights(model_id, header.weights)
            self._require_same_sums(model_id, header)
        for seq, number in sorted(found, reverse=True):
            model = self._unless_damaged(files[number], self._restore)
            if model is None:
                seqs[number] = None
                continue
            if seq < max(found)[0]:
                log.warning("older_snapshot_serves model=%s seq=%d", model_id, seq)
            model.snapshots = [NO_SNAPSHOT if seq is None else seq for seq in seqs]
            if model.needs_snapshot:
                self._changed[model_id] = model
            if self.copies is not None:
                self.copies.restored(model)
            return

    def _require_same_weights(self, model_id: str, found: str) -> None:
        weights = self.backend.card.weights
        if found not in ("", weights) and not self.allow_weights_mismatch:
            raise StateRefused(
                f"{self.folder}: the model {model_id} was trained on {found} weights, and now they are {weights}; "
                f"start with {weights_setting(found)}, or with models.0.allow_weights_mismatch=true"
            )

    def _require_same_sums(self, model_id: str, header: SnapshotHeader) -> None:
        """What is summed in another order ends at other bits."""
        backend = self.backend
        for setting, found, now, allow, is_allowed in (
            ("gradient_shards", header.gradient_shards, backend.gradient_shards, "shard", self.allow_shard_mismatch),
            ("parallel.tensor", header.tensor, backend.tensor, "tensor", self.allow_tensor_mismatch),
            ("parallel.context", header.context, backend.context, "context", self.allow_context_mismatch),
        ):
            if found != now and not is_allowed:
                raise StateRefused(
                    f"{self.folder}: the model {model_id} was trained with {setting}={found}, and now it is {now}; "
                    f"start with models.0.{setting}={found}, or with models.0.allow_{allow}_mismatch=true"
                )

    def _unless_damaged(self, file: Path, read: Callable[[Path], T]) -> T | None:
        if not file.exists():
            return None
        try:
            return read(file)
        except (FileDamaged, ModelError) as e:
            log.error("snapshot_unusable file=%s error=%s", file, e)
            set_aside(file)
            return None

    def _restore(self, file: Path) -> QueuedModel:
        tensors, metadata = read_tensors(file)
        header = _header(metadata)
        if "weights" not in tensors:
            raise FileDamaged("it has no weights")
        try:
            unstored = msgspec.msgpack.decode(tensors.pop(UNSTORED).tobytes(), type=list[Trained])
        except (msgspec.MsgspecError, KeyError) as e:
            raise FileDamaged(f"its results cannot be read ({e!r})") from None
        weights = self.backend.restore(header.lora, ModelImage(tensors, header.steps))
        seq = header.seq_id
        model = QueuedModel(header.model_id, header.lora, weights, received_seq=seq, applied_seq=seq)
        self.table.models[header.model_id] = model
        self.table.unstored |= {r.request_id: r for r in unstored}
        for sampler_id, place in header.samplers.items():
            if place is SamplerPlace.TODAY:
                self.sampler_cache.keep(sampler_id, model)
            elif sampler_id not in self.sampler_cache.kept:
                log.warning("sampler_lost sampler=%s model=%s", sampler_id, header.model_id)
        return model

    def _file(self, model_id: str, number: int) -> Path:
        return self.folder / snapshot_name(model_id, number)


def _header(metadata: str) -> SnapshotHeader:
    try:
        saved = with_new_keys(msgspec.json.decode(metadata), at=("models", 0))
        header = msgspec.convert(saved, SnapshotHeader)
    except msgspec.MsgspecError as e:
        raise FileDamaged(f"not a snapshot of format {FORMAT} ({e!r})") from None
    if header.format != FORMAT:
        raise FileDamaged(f"not a snapshot of format {FORMAT} (it names {header.format})")
    return header


def _log_error(_: None, error: Exception | None) -> None:
    if error is not None:
        log.error("file_work_failed error=%r", error)
