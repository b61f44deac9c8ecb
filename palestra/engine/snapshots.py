"""Snapshots: a model as it is between two requests, in one file that is whole or absent.

Owns: the format, when one is due, coming back from them. Never touches: computing, the journal (the server's).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import StrEnum
from math import inf
from pathlib import Path

import msgspec
import numpy as np

from palestra.engine.backend import Backend, ModelImage
from palestra.engine.files import FileDamaged, FileThread, name_of, own_folder, read_tensors, set_aside, write_tensors
from palestra.engine.queues import ModelTable, TrainedModel
from palestra.engine.samplers import SamplerShelf
from palestra.engine.stats import Counters
from palestra.model import ModelError
from palestra.types import LoraConfig
from palestra.types.engine import FromWorker, Snapshotted, Trained

log = logging.getLogger(__name__)

FORMAT = 1
SUFFIX = ".snapshot"
UNSTORED = "unstored"
MAX_IN_FLIGHT = 4  # each is a copy of its model until it is on disk
SCAN_EVERY_S = 0.1


class SamplerPlace(StrEnum):
    TODAY = "today"
    """It is the model's weights in this very snapshot."""
    FILE = "file"


class Header(msgspec.Struct, kw_only=True):
    format: int
    model_id: str
    lora: LoraConfig
    steps: int
    seq_id: int
    samplers: dict[str, SamplerPlace]


class Snapshots:
    def __init__(
        self,
        backend: Backend,
        table: ModelTable,
        shelf: SamplerShelf,
        files: FileThread,
        counters: Counters,
        send: Callable[[FromWorker], None],
        folder: Path,
        *,
        every_s: float,
        every_bytes: int,
    ):
        self.backend, self.table, self.shelf, self.files = backend, table, shelf, files
        self.counters, self._send, self.folder = counters, send, own_folder(folder)
        self.every_s, self.every_bytes = every_s, every_bytes
        self._changed: dict[str, TrainedModel] = {}
        self._in_flight = 0
        self._scan_at = 0.0

    # When

    def on_applied(self, model: TrainedModel) -> None:
        """The model is between two requests."""
        if model.is_changed:
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
        """How long nothing will be due, if nothing happens."""
        if not self._changed or self._in_flight >= MAX_IN_FLIGHT:
            return inf
        due = min((self._due_at(m) for m in self._changed.values() if self._can_take(m)), default=inf)
        return max(due, self._scan_at) - time.monotonic()

    def _due_at(self, model: TrainedModel) -> float:
        if model.bytes_since_snapshot >= self.every_bytes:
            return -inf
        return model.snapshot_at + self.every_s

    def _can_take(self, model: TrainedModel) -> bool:
        return model.is_between_requests and not model.is_snapshotting

    def _take_if_due(self, model: TrainedModel, now: float) -> None:
        if self._in_flight < MAX_IN_FLIGHT and self._can_take(model) and now >= self._due_at(model):
            self.take(model)

    # How

    def take(self, model: TrainedModel) -> None:
        """Copied here and now, written in the file thread."""
        image, places = self.backend.image(model.weights), self.shelf.secure(model)
        header = Header(
            format=FORMAT,
            model_id=model.model_id,
            lora=model.lora,
            steps=image.steps,
            seq_id=model.applied_seq,
            samplers={n: SamplerPlace.TODAY if file is None else SamplerPlace.FILE for n, file in places.items()},
        )
        unstored = self.table.unstored_of(model)
        needed = [file for file in places.values() if file is not None]
        self._changed.pop(model.model_id, None)
        model.is_snapshotting = True
        model.snapshot_at, model.bytes_since_snapshot = time.monotonic(), 0
        self._in_flight += 1

        def work() -> None:
            for file in needed:
                if not file.exists():
                    raise FileNotFoundError(f"{file}: a sampler of this model could not be written")
            results = np.frombuffer(msgspec.msgpack.encode(unstored), np.uint8)
            metadata = msgspec.json.encode(header).decode()
            write_tensors(self._file(header.model_id), {**image.tensors, UNSTORED: results}, metadata)

        def then(_: None, error: Exception | None) -> None:
            self._in_flight -= 1
            model.is_snapshotting = False
            if model.is_dropped:
                return
            if error is None:
                model.snapshot_seq = header.seq_id
                self.counters.snapshots += 1
                self._send(Snapshotted(model_id=model.model_id, seq_id=header.seq_id))
            else:
                log.error("snapshot_failed model=%s seq=%d error=%r", model.model_id, header.seq_id, error)
            if model.is_changed:
                self._changed[model.model_id] = model

        self.files.submit(work, then)

    def take_all(self) -> None:
        """Before the end: every model that changed, as of its last whole request."""
        while self.files.pending:  # a save may be somebody's last request
            self.files.wait()
        for model in list(self.table.models.values()):
            if model.running is not None and model.running.train:
                self.backend.restore_gradient(model.weights, model.running.gradient)
            model.running = None
            if model.is_changed:
                self.take(model)
        while self.files.pending:
            self.files.wait()

    def drop(self, model: TrainedModel) -> None:
        """In the file thread: after a snapshot that is under way."""
        self._changed.pop(model.model_id, None)
        file = self._file(model.model_id)
        self.files.submit(lambda: file.unlink(missing_ok=True), _log_error)

    # Coming back

    def restore(self) -> None:
        for file in sorted(self.folder.glob("*" + SUFFIX)):
            try:
                self._restore(file)
            except (FileDamaged, ModelError) as e:
                log.error("snapshot_unusable file=%s error=%s", file, e)
                set_aside(file)

    def _restore(self, file: Path) -> None:
        tensors, metadata = read_tensors(file)
        try:
            header = msgspec.json.decode(metadata, type=Header)
            unstored = msgspec.msgpack.decode(tensors.pop(UNSTORED).tobytes(), type=list[Trained])
        except (msgspec.MsgspecError, KeyError) as e:
            raise FileDamaged(f"not a snapshot of format {FORMAT} ({e!r})") from None
        if header.format != FORMAT or "weights" not in tensors:
            raise FileDamaged(f"not a snapshot of format {FORMAT} (it names {header.format})")
        weights = self.backend.restore(header.lora, ModelImage(tensors, header.steps))
        seq = header.seq_id
        model = TrainedModel(header.model_id, header.lora, weights, received_seq=seq, applied_seq=seq, snapshot_seq=seq)
        self.table.models[header.model_id] = model
        self.table.unstored |= {r.request_id: r for r in unstored}
        for sampler_id, place in header.samplers.items():
            if place is SamplerPlace.TODAY:
                self.shelf.keep(sampler_id, model)
            elif sampler_id not in self.shelf.kept:
                log.warning("sampler_lost sampler=%s model=%s", sampler_id, header.model_id)

    def _file(self, model_id: str) -> Path:
        return self.folder / (name_of(model_id) + SUFFIX)


def _log_error(_: None, error: Exception | None) -> None:
    if error is not None:
        log.error("file_work_failed error=%r", error)
