"""Episodes on disk: rows that are written as the board changes, and read back as a whole.

Owns: how the rows of the board are stored in tables. Never touches: what they mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import msgspec
from sqlalchemy import Connection, Delete, Insert, Table, bindparam, delete, select

from palestra.store import tables
from palestra.store.rows import fetch_all
from palestra.types.episode_rows import Change, EpisodeRow, Gone, GroupRow, Key, Row, RunRow, SavedRows, Tombstone
from palestra.util.json_types import JsonObject

TABLES: dict[type[Row], Table] = {
    RunRow: tables.episode_runs,
    GroupRow: tables.episode_groups,
    EpisodeRow: tables.episodes,
    Tombstone: tables.episode_tombstones,
}


def save_changes(conn: Connection, changes: Iterable[Change]) -> None:
    """Saves changes; where a row has several, the last one counts."""
    newest: dict[type[Row], dict[Key, Row | None]] = {}
    for one in changes:
        kind, row = (one.kind, None) if isinstance(one, Gone) else (type(one), one)
        newest.setdefault(kind, {})[one.key] = row
    for kind, rows in newest.items():
        if kept := [_values(row) for row in rows.values() if row is not None]:
            conn.execute(_upsert(TABLES[kind], conn.dialect.name), kept)
        if gone := [_names(TABLES[kind], key) for key, row in rows.items() if row is None]:
            conn.execute(_delete(TABLES[kind]), gone)


def load_all(conn: Connection) -> SavedRows:
    return SavedRows(
        runs=fetch_all(conn, RunRow, select(tables.episode_runs)),
        groups=fetch_all(conn, GroupRow, select(tables.episode_groups)),
        episodes=fetch_all(conn, EpisodeRow, select(tables.episodes)),
        tombstones=fetch_all(conn, Tombstone, select(tables.episode_tombstones)),
    )


def _values(row: Row) -> JsonObject:
    return msgspec.to_builtins(row, builtin_types=(bytes,))


@cache
def _upsert(table: Table, dialect: str) -> Insert:
    if dialect == "postgresql":  # imported only where it is used: it is large
        from sqlalchemy.dialects import postgresql

        statement = postgresql.insert(table)
    else:
        from sqlalchemy.dialects import sqlite

        statement = sqlite.insert(table)
    keys = table.primary_key.columns.keys()
    others = {name: value for name, value in statement.excluded.items() if name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=others)


@cache
def _delete(table: Table) -> Delete:
    """The names of the parameters differ from those of the columns, because SQLAlchemy reserves the latter."""
    return delete(table).where(*(column == bindparam(f"key_{column.name}") for column in table.primary_key))


def _names(table: Table, key: Key) -> Mapping[str, str]:
    parts = (key,) if isinstance(key, str) else key
    return {f"key_{column.name}": part for column, part in zip(table.primary_key, parts, strict=True)}
