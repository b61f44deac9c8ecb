"""Sessions of Tinker clients, which are alive as long as heartbeats arrive."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from sqlalchemy import Connection, bindparam, select, update

from palestra.store.records import Page, SessionRow, SessionStatus
from palestra.store.rows import fetch_all, fetch_one, fetch_page, insert_once
from palestra.store.tables import sessions as t


def insert_session(conn: Connection, session: SessionRow) -> SessionRow:
    """Stores a session and returns the stored row: this one, or an earlier one with the same id."""
    # Rounded to the microsecond: a search cursor goes through a datetime and must come back equal.
    session = msgspec.structs.replace(session, created_at=round(session.created_at, 6))
    if insert_once(conn, t, msgspec.to_builtins(session)):
        return session
    stored = get_session(conn, session.session_id)
    assert stored is not None
    return stored


def get_session(conn: Connection, session_id: str) -> SessionRow | None:
    return fetch_one(conn, SessionRow, select(t).where(t.c.session_id == session_id))


def list_sessions(
    conn: Connection, *, owner: str | None = None, limit: int | None = None, offset: int = 0
) -> Page[SessionRow]:
    """Returns sessions, newest first; without `owner` those of all owners."""
    query = select(t).order_by(t.c.created_at.desc(), t.c.session_id.desc())
    if owner is not None:
        query = query.where(t.c.owner == owner)
    return fetch_page(conn, SessionRow, query, limit=limit, offset=offset)


def active_sessions(conn: Connection) -> list[SessionRow]:
    return fetch_all(conn, SessionRow, select(t).where(t.c.status == SessionStatus.ACTIVE).order_by(t.c.created_at))


def touch_sessions(conn: Connection, heartbeats: Mapping[str, float]) -> None:
    """Stores, by session id, the time of its last heartbeat. Times never decrease; sessions that have ended are not
    changed."""
    if not heartbeats:
        return
    at = bindparam("at", type_=t.c.last_heartbeat_at.type)
    later = (t.c.status == SessionStatus.ACTIVE) & (t.c.last_heartbeat_at < at)
    change = update(t).where(t.c.session_id == bindparam("id"), later).values(last_heartbeat_at=at)
    conn.execute(change, [{"id": session_id, "at": time} for session_id, time in heartbeats.items()])


def finish_session(conn: Connection, session_id: str, *, reason: str, detail: str | None) -> bool:
    """Marks a session as finished. Only its first end counts; returns False for any later one."""
    return _end(conn, session_id, status=SessionStatus.FINISHED, finish_reason=reason, finish_detail=detail)


def expire_session(conn: Connection, session_id: str) -> bool:
    return _end(conn, session_id, status=SessionStatus.EXPIRED)


def _end(conn: Connection, session_id: str, **values: str | None) -> bool:
    active = (t.c.session_id == session_id) & (t.c.status == SessionStatus.ACTIVE)
    return conn.execute(update(t).where(active).values(**values)).rowcount > 0


def set_session_project(conn: Connection, session_id: str, project_id: str | None) -> bool:
    return conn.execute(update(t).where(t.c.session_id == session_id).values(project_id=project_id)).rowcount > 0
