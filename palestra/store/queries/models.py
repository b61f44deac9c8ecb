"""Models: the training runs, their state, and up to which request a snapshot covers each."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
from sqlalchemy import ColumnElement, Connection, bindparam, exists, select, update

from palestra.store.queries.checkpoints import is_alive
from palestra.store.records import CheckpointStatus, ModelRow, ModelStatus, Page
from palestra.store.rows import fetch_all, fetch_one, fetch_page, insert_once
from palestra.store.tables import checkpoints, sessions
from palestra.store.tables import models as t


def insert_model(conn: Connection, model: ModelRow) -> ModelRow:
    """Stores a model and returns the stored row: this one, or an earlier one with the same id."""
    if insert_once(conn, t, msgspec.to_builtins(model)):
        return model
    stored = get_model(conn, model.model_id)
    assert stored is not None
    return stored


def get_model(conn: Connection, model_id: str) -> ModelRow | None:
    return fetch_one(conn, ModelRow, select(t).where(t.c.model_id == model_id))


def models_of_session(conn: Connection, session_id: str) -> list[ModelRow]:
    """Returns the models of a session, in order of creation."""
    query = select(t).where(t.c.session_id == session_id).order_by(t.c.created_at, t.c.model_id)
    return fetch_all(conn, ModelRow, query)


def models_in(conn: Connection, statuses: Collection[ModelStatus]) -> list[ModelRow]:
    query = select(t).where(t.c.status.in_(statuses)).order_by(t.c.created_at, t.c.model_id)
    return fetch_all(conn, ModelRow, query)


def corrupted_models(conn: Connection) -> list[ModelRow]:
    """Returns the models whose state was lost."""
    return fetch_all(conn, ModelRow, select(t).where(t.c.corrupted))


def list_models(
    conn: Connection,
    *,
    owner: str | None = None,
    public_at: float | None = None,
    project_id: str | None = None,
    limit: int | None = None,
    offset: int = 0,
) -> Page[ModelRow]:
    """Returns models, newest first; without `owner` or `project_id` those of all owners or projects. `public_at` adds
    models of other owners that have a public checkpoint at this time."""
    query = select(t).order_by(t.c.created_at.desc(), t.c.model_id.desc())
    if owner is not None:
        query = query.where(t.c.owner == owner if public_at is None else (t.c.owner == owner) | _is_public(public_at))
    if project_id is not None:
        query = query.join(sessions, sessions.c.session_id == t.c.session_id).where(sessions.c.project_id == project_id)
    return fetch_page(conn, ModelRow, query, limit=limit, offset=offset)


def is_public(conn: Connection, model_id: str, now: float) -> bool:
    """Whether one of the model's checkpoints is public at this time."""
    return conn.execute(select(t.c.model_id).where(t.c.model_id == model_id, _is_public(now))).first() is not None


def _is_public(now: float) -> ColumnElement[bool]:
    of_this = (checkpoints.c.model_id == t.c.model_id) & (checkpoints.c.status == CheckpointStatus.COMPLETED)
    return exists().where(of_this, checkpoints.c.public, is_alive(now))


def set_model_status(conn: Connection, model_id: str, status: ModelStatus, *, error: str | None = None) -> bool:
    change = update(t).where(t.c.model_id == model_id).values(status=status, error=error)
    return conn.execute(change).rowcount > 0


def mark_corrupted(conn: Connection, model_id: str) -> bool:
    return conn.execute(update(t).where(t.c.model_id == model_id).values(corrupted=True)).rowcount > 0


def advance_snapshots(conn: Connection, seqs: Mapping[str, int]) -> None:
    """Stores, by model id, the last request that the model's snapshot covers. Numbers never decrease."""
    if not seqs:
        return
    seq = bindparam("seq", type_=t.c.snapshot_seq.type)
    change = update(t).where(t.c.model_id == bindparam("id"), t.c.snapshot_seq < seq).values(snapshot_seq=seq)
    conn.execute(change, [{"id": model_id, "seq": seq_id} for model_id, seq_id in seqs.items()])


def touch_models(conn: Connection, requests: Mapping[str, float]) -> None:
    """Stores, by model id, the time of its last request. Times never decrease."""
    if not requests:
        return
    at = bindparam("at", type_=t.c.last_request_at.type)
    change = update(t).where(t.c.model_id == bindparam("id"), t.c.last_request_at < at).values(last_request_at=at)
    conn.execute(change, [{"id": model_id, "at": time} for model_id, time in requests.items()])
