"""Values that the server keeps in the database, such as the secret that it signs with."""

from __future__ import annotations

from collections.abc import Callable, Collection

from sqlalchemy import Connection, delete, select, update

from palestra.store.rows import insert_once
from palestra.store.tables import settings as t

INSTALLATION = "installation"
"""Name of the setting that tells this server's object storage from that of other servers."""


def get_setting(conn: Connection, name: str) -> str | None:
    return conn.execute(select(t.c.value).where(t.c.name == name)).scalar_one_or_none()


def setting_once(conn: Connection, name: str, make: Callable[[], str]) -> str:
    """Returns the stored value; the first call makes it."""
    stored = get_setting(conn, name)
    if stored is not None:
        return stored
    insert_once(conn, t, {"name": name, "value": make()})
    return conn.execute(select(t.c.value).where(t.c.name == name)).scalar_one()


def put_setting(conn: Connection, name: str, value: str) -> None:
    """Makes or replaces a value."""
    if not insert_once(conn, t, {"name": name, "value": value}):
        conn.execute(update(t).where(t.c.name == name).values(value=value))


def settings_under(conn: Connection, prefix: str) -> dict[str, str]:
    """Returns the values whose names begin with `prefix`, by name."""
    found = conn.execute(select(t.c.name, t.c.value).where(t.c.name.startswith(prefix, autoescape=True)))
    return {row.name: row.value for row in found}


def delete_settings(conn: Connection, names: Collection[str]) -> None:
    conn.execute(delete(t).where(t.c.name.in_(names)))
