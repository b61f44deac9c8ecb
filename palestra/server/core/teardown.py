"""Ends sessions and models: what they hold is released, then the end is written to the database.

Owns: that order. Never touches: why they end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sqlalchemy import Connection

from palestra.server.core.samples.requests import SamplingRequests
from palestra.server.core.sessions import TinkerSession, TinkerSessions
from palestra.server.core.training.models import TrackedModel
from palestra.server.core.training.requests import TrainingRequests
from palestra.store import Store
from palestra.store.queries import checkpoints as checkpoint_rows
from palestra.store.queries import models as model_rows
from palestra.store.queries import samplers as sampler_rows
from palestra.store.queries.settings import delete_settings
from palestra.store.records import LOADED, ModelStatus


class Teardown:
    def __init__(self, store: Store, sessions: TinkerSessions, training: TrainingRequests, sampling: SamplingRequests):
        self._store, self._sessions, self._training, self._sampling = store, sessions, training, sampling

    async def end_session(self, session: TinkerSession, reason: str, record: Callable[[], Awaitable[object]]) -> None:
        """Releases models and samplers, then ends the session in short writes; if one fails, it is tried again."""
        self._sessions.active.pop(session.session_id, None)
        for model in [m for m in self._training.models.values() if m.session_id == session.session_id]:
            self._training.drop(model, reason)
        samplers = [s for s in self._sampling.samplers.values() if s.session_id == session.session_id]
        blocks = [name for sampler in samplers for name in sampler.stored_blocks]
        self._sampling.drop(samplers, reason)

        def write(c: Connection) -> None:
            rows = model_rows.models_of_session(c, session.session_id)
            _unload_rows(c, [row.model_id for row in rows if row.status in LOADED], reason)
            sampler_rows.drop_samplers(
                c, [row.sampler_id for row in sampler_rows.samplers_of_session(c, session.session_id)]
            )
            if blocks:
                delete_settings(c, blocks)

        try:
            await self._store.write(write)
            await record()
        except BaseException:
            self._sessions.active[session.session_id] = session
            raise

    async def unload(self, model: TrackedModel, reason: str) -> None:
        self._training.drop(model, reason)
        await self._store.write(lambda c: _unload_rows(c, [model.model_id], reason))


def _unload_rows(c: Connection, model_ids: list[str], reason: str) -> None:
    """Marks models as unloaded; saves that were under way will never end."""
    for model_id in model_ids:
        model_rows.set_model_status(c, model_id, ModelStatus.UNLOADED)
    for save in checkpoint_rows.saves_under_way(c):
        if save.model_id in model_ids:
            checkpoint_rows.fail_checkpoint(c, save.request_id, error=reason)
