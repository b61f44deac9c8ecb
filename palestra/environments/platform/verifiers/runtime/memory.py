"""A database as a copy in memory that refuses writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Any

from palestra.util.json_types import JsonObject

Row = JsonObject
NAMES = (
    "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' "
    "AND name NOT IN ('_changes', '_events', '_facts') ORDER BY name"
)
"""Tables without those of the platform: a diff must not find them. `_events` can be queried by name."""
ROLLBACK_JOURNAL = b"\x01\x01"
"""Bytes of a database header which otherwise name a write-ahead log: a copy in memory has none."""


def part_of(data: bytes, app: str) -> bytes:
    """Returns a world's database with the tables of one of its apps only, without the app's prefix. Raises KeyError."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.deserialize(data)
    connection.execute("PRAGMA temp_store = MEMORY")
    made = connection.execute("SELECT type, name FROM sqlite_master WHERE type IN ('trigger', 'table')").fetchall()
    prefix = f"{app}_"
    found = sorted(((kind, name) for kind, name in made if not name.startswith("sqlite_")), reverse=True)
    if not any(kind == "table" and name.startswith(prefix) for kind, name in found):
        raise KeyError(f"there is no app {app!r} in this world")
    for kind, name in found:  # triggers refer to tables, so they are dropped first
        if kind == "trigger" or not name.startswith(prefix):
            connection.execute(f'DROP {kind} "{name}"')
        else:
            connection.execute(f'ALTER TABLE "{name}" RENAME TO "{name.removeprefix(prefix)}"')
    part = connection.serialize()
    connection.close()
    return part


class MemoryDatabase:
    def __init__(self, data: bytes, name: str) -> None:
        self.name = name
        self._connection = sqlite3.connect(":memory:")
        self._connection.deserialize(data[:18] + ROLLBACK_JOURNAL + data[20:])
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("PRAGMA temp_store = MEMORY")
        self._connection.execute("PRAGMA query_only = 1")
        self._connection.set_authorizer(_no_other_database)

    def tables(self) -> list[str]:
        return [row["name"] for row in self.rows(NAMES)]

    def rows(self, query: str, args: Iterable[Any] = ()) -> list[Row]:
        return [dict(row) for row in self._connection.execute(query, tuple(args))]


def _no_other_database(action: int, *_args: Any) -> int:
    return sqlite3.SQLITE_DENY if action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH) else sqlite3.SQLITE_OK
