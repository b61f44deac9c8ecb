"""Episodes on disk: rows written as the board's changes come, and read back as a whole.

Owns: how the board's rows lie in tables. Never touches: what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Table, select

from palestra.store import tables
from palestra.store.rows import fetch_all
from palestra.types.episode_rows import Change, EpisodeRow, GroupRow, Key, Row, RunRow, SavedRows, Tombstone

R = TypeVar("R", RunRow, EpisodeRow)

TABLES: dict[type[Row], Table] = {
    RunRow: tables.episode_runs,
    GroupRow: tables.episode_groups,
    EpisodeRow: tables.episodes,
    Tombstone: tables.episode_tombstones,
}


def save_changes(conn: Connection, changes: Sequence[Change]) -> None:
    """Of several changes of a row the last one counts."""
    newest: dict[type[Row], dict[Key, Row | None]] = {kind: {} for kind in TABLES}
    for change in changes:
        newest[change.kind][change.key] = change.row
    # Written by hand: SQLAlchemy's way through its parameters takes as long as the database.
    mark = "?" if conn.dialect.paramstyle == "qmark" else "%s"
    for kind, table in TABLES.items():
        if kept := [_values(row) for row in newest[kind].values() if row is not None]:
            conn.exec_driver_sql(_upsert(kind, table, mark), kept)
        if gone := [key for key, row in newest[kind].items() if row is None]:
            conn.exec_driver_sql(_delete(table, mark), gone)


def load_all(conn: Connection) -> SavedRows:
    return SavedRows(
        runs=_fetch(conn, RunRow, "settings"),
        groups=fetch_all(conn, GroupRow, select(tables.episode_groups)),
        episodes=_fetch(conn, EpisodeRow, "losses"),
        tombstones=fetch_all(conn, Tombstone, select(tables.episode_tombstones)),
    )


def _values(row: Row) -> tuple[Any, ...]:
    """In the order of the record's fields: enums as their text, lists and records as JSON."""
    values = msgspec.structs.astuple(row)
    return tuple([value if type(value) in _PLAIN else _encoded(value) for value in values])


_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})


def _encoded(value: Any) -> str:
    return str(value) if isinstance(value, str) else msgspec.json.encode(value).decode()


def _fetch(conn: Connection, kind: type[R], encoded: str) -> list[R]:
    """`encoded`: the column that holds JSON."""
    rows = conn.execute(select(TABLES[kind])).mappings()
    plain = ({str(name): value for name, value in row.items()} for row in rows)
    return [msgspec.convert({**row, encoded: msgspec.json.decode(row[encoded])}, kind) for row in plain]


def _upsert(kind: type[Row], table: Table, mark: str) -> str:
    names = kind.__struct_fields__
    keys = [column.name for column in table.primary_key]
    columns, marks = ", ".join(f'"{name}"' for name in names), ", ".join(mark for _ in names)
    others = ", ".join(f'"{name}" = excluded."{name}"' for name in names if name not in keys)
    conflict = ", ".join(f'"{name}"' for name in keys)
    return f"INSERT INTO {table.name} ({columns}) VALUES ({marks}) ON CONFLICT ({conflict}) DO UPDATE SET {others}"


def _delete(table: Table, mark: str) -> str:
    return f"DELETE FROM {table.name} WHERE " + " AND ".join(
        f'"{column.name}" = {mark}' for column in table.primary_key
    )
