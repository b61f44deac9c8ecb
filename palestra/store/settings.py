"""Values the server makes once and keeps, e.g. the secret it signs with."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, select

from palestra.store.rows import insert_once
from palestra.store.tables import settings as t


def get_setting(conn: Connection, name: str) -> str | None:
    return conn.execute(select(t.c.value).where(t.c.name == name)).scalar_one_or_none()


def setting_once(conn: Connection, name: str, make: Callable[[], str]) -> str:
    """The stored value, made at the first call."""
    stored = get_setting(conn, name)
    if stored is not None:
        return stored
    insert_once(conn, t, {"name": name, "value": make()})
    return conn.execute(select(t.c.value).where(t.c.name == name)).scalar_one()
