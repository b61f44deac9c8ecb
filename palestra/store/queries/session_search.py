"""Searches sessions by name, owner and how they ended."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, and_, column, exists, func, or_, select, tuple_

from palestra.store.records import (
    CheckpointStatus,
    SearchCursor,
    SessionPage,
    SessionRow,
    SessionSearch,
    SessionSummary,
    StatusFilter,
)
from palestra.store.rows import fetch_all
from palestra.store.tables import checkpoints, models
from palestra.store.tables import sessions as t


def search_sessions(conn: Connection, search: SessionSearch) -> SessionPage:
    """Returns one page, newest first. Sessions that are created meanwhile do not shift the next page."""
    query = select(t).where(*_conditions(conn, search)).order_by(t.c.created_at.desc(), t.c.session_id.desc())
    found = fetch_all(conn, SessionRow, query.limit(search.limit + 1))
    page = found[: search.limit]
    cursor = None
    if len(found) > len(page):
        cursor = SearchCursor(created_at=page[-1].created_at, session_id=page[-1].session_id)
    return SessionPage(sessions=_with_checkpoints(conn, page), next_cursor=cursor)


def _conditions(conn: Connection, search: SessionSearch) -> list[ColumnElement[bool]]:
    conditions = []
    names = []
    if search.session_id is not None:
        names.append(t.c.session_id == search.session_id)
    if search.display_name is not None:
        words = search.display_name.split()
        names.append(and_(*(func.lower(t.c.display_name).contains(w.lower(), autoescape=True) for w in words)))
    if names:
        conditions.append(or_(*names))
    if search.owners is not None:
        conditions.append(t.c.owner.in_(search.owners))
    if search.project_ids is not None:
        conditions.append(t.c.project_id.in_(search.project_ids))
    if search.statuses is not None:
        conditions.append(or_(*(_has_status(s) for s in search.statuses)))
    conditions += [_has_metadata(conn, key, value) for key, value in search.user_metadata.items()]
    if search.cursor is not None:
        conditions.append(tuple_(t.c.created_at, t.c.session_id) < (search.cursor.created_at, search.cursor.session_id))
    return conditions


def _has_status(status: StatusFilter) -> ColumnElement[bool]:
    if status.finish_reasons is None:
        return t.c.status == status.status
    return and_(t.c.status == status.status, t.c.finish_reason.in_(status.finish_reasons))


def _has_metadata(conn: Connection, key: str, value: str) -> ColumnElement[bool]:
    if conn.dialect.name == "postgresql":
        return t.c.user_metadata[key].as_string() == value
    # This is not a JSON path, because SQLite cannot quote every key in one.
    entry = func.json_each(t.c.user_metadata).table_valued("key", "value")
    return exists(select(column("key")).select_from(entry).where(entry.c.key == key, entry.c.value == value))


def _with_checkpoints(conn: Connection, sessions: list[SessionRow]) -> list[SessionSummary]:
    c = checkpoints.c
    counts = (
        select(models.c.session_id, func.count(), func.coalesce(func.sum(c.size_bytes), 0))
        .join(models, models.c.model_id == c.model_id)
        .where(models.c.session_id.in_([s.session_id for s in sessions]), c.status == CheckpointStatus.COMPLETED)
        .group_by(models.c.session_id)
    )
    by_session = {session_id: (count, int(size)) for session_id, count, size in conn.execute(counts)}
    summaries = []
    for session in sessions:
        count, size = by_session.get(session.session_id, (0, 0))
        summaries.append(SessionSummary(session=session, checkpoints_count=count, checkpoint_storage_bytes=size))
    return summaries
