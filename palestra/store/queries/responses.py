"""Responses of the Responses API by their ids. Each belongs to a turn of a trace, and is deleted with it."""

from __future__ import annotations

import zlib

from msgspec import Struct
from sqlalchemy import Connection, delete, insert, select

from palestra.store.queries.traces import TurnKey
from palestra.store.tables import responses as r
from palestra.store.tables import traces as t


class StoredResponse(Struct, frozen=True, kw_only=True):
    response_id: str
    turn: TurnKey
    body: bytes
    """The response as it was sent, as JSON."""


def add_response(conn: Connection, response: StoredResponse) -> None:
    conn.execute(
        insert(r),
        {
            "response_id": response.response_id,
            "trace_id": response.turn.trace_id,
            "number": response.turn.number,
            "body": zlib.compress(response.body, 1),  # most of it is the tools, which repeat themselves
        },
    )


def find_response(conn: Connection, response_id: str, owner: str, origin: str | None) -> StoredResponse | None:
    """Finds a response of an owner. `origin`: only if it belongs to this attempt at an episode."""
    query = select(r).join(t, t.c.trace_id == r.c.trace_id).where(r.c.response_id == response_id, t.c.owner == owner)
    if origin is not None:
        query = query.where(t.c.origin == origin)
    row = conn.execute(query).one_or_none()
    if row is None:
        return None
    return StoredResponse(
        response_id=row.response_id, turn=TurnKey(row.trace_id, row.number), body=zlib.decompress(row.body)
    )


def delete_response(conn: Connection, response_id: str) -> None:
    conn.execute(delete(r).where(r.c.response_id == response_id))
