"""Deletes rows that are no longer needed, so that the database does not grow for ever."""

from __future__ import annotations

from sqlalchemy import Connection, delete, exists

from palestra.store.records import ModelStatus, SamplerStatus, SessionStatus
from palestra.store.tables import checkpoints, models, samplers, saves, sessions


def purge(conn: Connection, before: float) -> None:
    """Deletes samplers that were dropped, runs without checkpoints and sessions without runs, if they ended before
    `before`."""
    m, s = models.c, sessions.c
    conn.execute(delete(samplers).where(samplers.c.status == SamplerStatus.GONE, samplers.c.created_at < before))
    is_loaded = m.status.in_((ModelStatus.PENDING, ModelStatus.READY))
    has_files = exists().where(checkpoints.c.model_id == m.model_id) | exists().where(saves.c.model_id == m.model_id)
    conn.execute(delete(models).where(~is_loaded, m.last_request_at < before, ~has_files))
    has_rows = exists().where(m.session_id == s.session_id) | exists().where(samplers.c.session_id == s.session_id)
    ended = (s.status != SessionStatus.ACTIVE) & (s.last_heartbeat_at < before)
    conn.execute(delete(sessions).where(ended, ~has_rows))
