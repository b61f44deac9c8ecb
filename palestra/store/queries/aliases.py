"""Aliases: names that an owner gives to models, and moves."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, delete, insert, select, update

from palestra.store.records import Alias
from palestra.store.rows import fetch_all, fetch_one
from palestra.store.tables import aliases as t


def put_alias(conn: Connection, *, owner: str, name: str, model: str, now: float) -> Alias:
    """Makes or moves an alias. If it already points at this model it is not changed, so that a repeated request counts
    once."""
    found = fetch_one(conn, Alias, select(t).where(t.c.owner == owner, t.c.name == name))
    if found is None:
        made = Alias(owner=owner, name=name, model=model, created_at=now, updated_at=now)
        conn.execute(insert(t).values(**msgspec.to_builtins(made)))
        return made
    if found.model == model:
        return found
    moved = msgspec.structs.replace(found, model=model, version=found.version + 1, updated_at=now)
    changed = {"model": moved.model, "version": moved.version, "updated_at": moved.updated_at}
    conn.execute(update(t).where(t.c.owner == owner, t.c.name == name).values(**changed))
    return moved


def list_aliases(conn: Connection) -> list[Alias]:
    """Returns the aliases of all owners, by name."""
    return fetch_all(conn, Alias, select(t).order_by(t.c.owner, t.c.name))


def drop_alias(conn: Connection, *, owner: str, name: str) -> None:
    conn.execute(delete(t).where(t.c.owner == owner, t.c.name == name))
