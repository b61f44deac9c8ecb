"""Copies of snapshots at the server, for a worker on another machine: what is lost with that machine is computed again
from them and the server's journal.

The server has two copies of each model, as the worker has two snapshots; a new one takes the place of the older. The
journal keeps what is not in both.

Owns: when a copy is due. Never touches: snapshots, how a file gets to the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from pathlib import Path

from palestra.engine.files import own_folder, snapshot_name
from palestra.engine.queues import KEPT_SNAPSHOTS, NO_SNAPSHOT, ModelTable, QueuedModel
from palestra.engine.uploads import FileUploads, Upload
from palestra.types.engine import FileArea, FromWorker, Snapshotted

AGAIN_S = 5.0  # after a copy that failed


class SnapshotUploads:
    def __init__(
        self,
        table: ModelTable,
        uploads: FileUploads,
        send: Callable[[FromWorker], None],
        state: Path,
        *,
        every_s: float,
        are_copies: bool,
    ):
        """`are_copies`: the snapshots that are restored came from the server."""
        self.table, self.uploads, self._send, self._state = table, uploads, send, state
        self.every_s, self._are_copies = every_s, are_copies
        self._due: dict[str, float] = {}
        """When the next copy of a model may be made, by model."""
        self._copying: set[str] = set()
        self._links = own_folder(state / "copying")
        table.copies_of_new = lambda: [NO_SNAPSHOT] * KEPT_SNAPSHOTS

    def restored(self, model: QueuedModel) -> None:
        model.copies = list(model.snapshots) if self._are_copies else [NO_SNAPSHOT] * KEPT_SNAPSHOTS
        self._expect(model)

    def on_snapshot(self, model: QueuedModel) -> None:
        self._expect(model)
        self.take_due()

    def _expect(self, model: QueuedModel) -> None:
        if max(model.snapshots) > min(model.copies):
            self._due.setdefault(model.model_id, time.monotonic() + self.every_s)

    @property
    def next_s(self) -> float:
        """Returns for how long nothing will be due."""
        due = min((at for name, at in self._due.items() if name not in self._copying), default=inf)
        return due - time.monotonic()

    def take_due(self) -> None:
        if self.next_s > 0:
            return
        for model_id, at in list(self._due.items()):
            if at <= time.monotonic() and model_id not in self._copying:
                self._copy(model_id)

    def take_all(self) -> None:
        """Uploads, before the end, every model whose newest snapshot is only here."""
        for model in list(self.table.models.values()):
            if model.copies and max(model.snapshots) > max(model.copies) and model.model_id not in self._copying:
                self._copy(model.model_id)

    def drop(self, model: QueuedModel) -> None:
        self._due.pop(model.model_id, None)
        self.uploads.drop([self._path(model, number) for number in range(KEPT_SNAPSHOTS)])

    def _copy(self, model_id: str) -> None:
        self._due.pop(model_id, None)
        model = self.table.models.get(model_id)
        if model is None:
            return
        seq, number = max(model.snapshots), model.copies.index(min(model.copies))
        newest = max(place for place, one in enumerate(model.snapshots) if one == seq)  # of two, the first is replaced
        source = self._links / snapshot_name(model_id, newest)
        source.unlink(missing_ok=True)
        source.hardlink_to(self._state / self._path(model, newest))  # later snapshots do not change it
        self._copying.add(model_id)

        def then(error: Exception | None) -> None:
            source.unlink(missing_ok=True)
            self._copying.discard(model_id)
            if model.is_dropped:
                return
            if error is None:
                model.copies[number] = seq
                path = self._path(model, number)
                self._send(Snapshotted(model_id=model_id, seq_id=seq, covered_seq=model.settled_seq, file=path))
                self._expect(model)
            else:
                self._due[model_id] = time.monotonic() + AGAIN_S

        self.uploads.add(Upload(FileArea.STATE, self._path(model, number), then, source))

    def _path(self, model: QueuedModel, number: int) -> str:
        return f"models/{snapshot_name(model.model_id, number)}"
