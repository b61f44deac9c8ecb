"""Episodes on disk: rows written as the board's changes come, and read back as a whole.

Owns: how the board's rows lie in tables. Never touches: what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Table, select

from palestra.store import tables
from palestra.store.databases import Driver
from palestra.types.episode_rows import Change, EpisodeRow, GroupRow, Key, Row, RunRow, SavedRows, Tombstone

R = TypeVar("R", RunRow, GroupRow, EpisodeRow, Tombstone)

FEW = 8  # changes: to sort them takes longer than to send them one by one

TABLES: dict[type[Row], Table] = {
    RunRow: tables.episode_runs,
    GroupRow: tables.episode_groups,
    EpisodeRow: tables.episodes,
    Tombstone: tables.episode_tombstones,
}


def save_changes(driver: Driver, changes: Sequence[Change]) -> None:
    """Of several changes of a row the last one counts."""
    cursor = driver.raw.cursor()
    try:
        if len(changes) <= FEW:
            for change in changes:
                _save(cursor, driver.mark, change)
        else:
            _save_many(cursor, driver.mark, changes)
    finally:
        cursor.close()


def _save(cursor: Any, mark: str, change: Change) -> None:
    if change.row is None:
        cursor.execute(_delete(change.kind, mark), change.key)
    else:
        cursor.execute(_upsert(change.kind, mark), _values(change.kind, change.row))


def _save_many(cursor: Any, mark: str, changes: Sequence[Change]) -> None:
    newest: dict[type[Row], dict[Key, Row | None]] = {}
    for change in changes:
        newest.setdefault(change.kind, {})[change.key] = change.row
    for kind, rows in newest.items():
        if kept := [_values(kind, row) for row in rows.values() if row is not None]:
            cursor.executemany(_upsert(kind, mark), kept)
        if gone := [key for key, row in rows.items() if row is None]:
            cursor.executemany(_delete(kind, mark), gone)


def load_all(conn: Connection) -> SavedRows:
    return SavedRows(
        runs=_fetch(conn, RunRow, "settings"),
        groups=_fetch(conn, GroupRow),
        episodes=_fetch(conn, EpisodeRow, "losses"),
        tombstones=_fetch(conn, Tombstone),
    )


def _values(kind: type[Row], row: Row) -> list[Any]:
    """In the order of the record's fields: enums as their text, lists and records as JSON."""
    values = list(msgspec.structs.astuple(row))
    for place, encoded in _encoders(kind):
        values[place] = encoded(values[place])
    return values


@cache
def _encoders(kind: type[Row]) -> list[tuple[int, Callable[[Any], str]]]:
    """By the places of those that are not plain."""
    types = enumerate(msgspec.inspect.type_info(kind).fields)  # type: ignore[union-attr]
    found = [(place, _ENCODERS[type(field.type)]) for place, field in types]
    return [(place, encoded) for place, encoded in found if encoded is not None]


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode() if value else "[]"


_ENCODERS: dict[type[msgspec.inspect.Type], Callable[[Any], str] | None] = {
    msgspec.inspect.EnumType: str,
    msgspec.inspect.ListType: _json,
    msgspec.inspect.StructType: _json,
    msgspec.inspect.UnionType: None,  # of plain ones and None
    **dict.fromkeys(
        (
            msgspec.inspect.StrType,
            msgspec.inspect.IntType,
            msgspec.inspect.FloatType,
            msgspec.inspect.BoolType,
            msgspec.inspect.BytesType,
        )
    ),
}


def _fetch(conn: Connection, kind: type[R], encoded: str | None = None) -> list[R]:
    """`encoded`: the column that holds JSON. Not by SQLAlchemy's mappings: there may be 100,000, and a start waits."""
    names = kind.__struct_fields__
    rows = conn.execute(select(*(TABLES[kind].c[name] for name in names)))
    plain = (dict(zip(names, row, strict=True)) for row in rows)
    if encoded is not None:
        plain = ({**row, encoded: msgspec.json.decode(row[encoded])} for row in plain)
    return [msgspec.convert(row, kind) for row in plain]


@cache
def _upsert(kind: type[Row], mark: str) -> str:
    table = TABLES[kind]
    names = kind.__struct_fields__
    keys = [column.name for column in table.primary_key]
    columns, marks = ", ".join(f'"{name}"' for name in names), ", ".join(mark for _ in names)
    others = ", ".join(f'"{name}" = excluded."{name}"' for name in names if name not in keys)
    conflict = ", ".join(f'"{name}"' for name in keys)
    return f"INSERT INTO {table.name} ({columns}) VALUES ({marks}) ON CONFLICT ({conflict}) DO UPDATE SET {others}"


@cache
def _delete(kind: type[Row], mark: str) -> str:
    table = TABLES[kind]
    return f"DELETE FROM {table.name} WHERE " + " AND ".join(
        f'"{column.name}" = {mark}' for column in table.primary_key
    )
