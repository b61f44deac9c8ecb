"""Models whose state is lost: the error that their clients get, until the model's row is deleted.

Owns: the message, the note in the database. Never touches: how a loss is noticed, requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import structlog
from sqlalchemy import Connection

from palestra.server.core.training.models import TrackedModel
from palestra.store import Store
from palestra.store.errors import StoreError
from palestra.store.queries import models as model_rows
from palestra.store.queries.checkpoints import last_checkpoints
from palestra.store.records import CheckpointRow, ModelRow, ModelStatus

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LostModel:
    owner: str
    message: str


class LostModels:
    def __init__(self, store: Store):
        self._store = store
        self._known: dict[str, LostModel] = {}

    def restore(self, rows: Iterable[ModelRow]) -> None:
        self._known.update({row.model_id: LostModel(row.owner, row.error or "state lost") for row in rows})

    def message(self, model_id: str, *, owner: str | None = None) -> str | None:
        """Returns the error text; None if the model is not lost, or belongs to another owner."""
        lost = self._known.get(model_id)
        return lost.message if lost is not None and owner in (None, lost.owner) else None

    def add(self, model: TrackedModel, why: str) -> None:
        """Marks a model as lost at once; `note` has to follow."""
        log.error("a model's state is lost", model=model.model_id, why=why)
        self._known[model.model_id] = LostModel(model.owner, f"state lost: {why}")

    async def note(self, model: TrackedModel, why: str) -> str:
        """Stores the loss in the database, with the checkpoint to resume from; returns the error text for its
        client."""
        try:
            now = time.time()
            found = await self._store.read(lambda c: last_checkpoints(c, [model.model_id], alive_at=now))
            message = f"state lost: {why}; {_advice(found.get(model.model_id))}"
            self._known[model.model_id] = LostModel(model.owner, message)
            await self._store.write(lambda c: _note(c, model.model_id, message))
        except StoreError as e:  # the next start finds it lost again
            log.error("the loss of a model could not be stored", model=model.model_id, error=str(e))
        return self._known[model.model_id].message


def _advice(checkpoint: CheckpointRow | None) -> str:
    if checkpoint is None:
        return "there is no saved checkpoint to resume from; start again with a new model"
    return f"resume from checkpoint {checkpoint.key.path}"


def _note(conn: Connection, model_id: str, message: str) -> None:
    model_rows.mark_corrupted(conn, model_id)
    model_rows.set_model_status(conn, model_id, ModelStatus.UNLOADED, error=message)
