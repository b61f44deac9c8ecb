"""Episodes on disk: rows written as the board's changes come, and read back as a whole.

A few changes are appended to a log, in one statement; after many of those, and with many changes, all that is logged
goes into the tables: register, claim and end of an episode are three entries of the log, and then one row.

Owns: how the board's rows lie in tables and log. Never touches: what they mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Table, select

from palestra.store import tables
from palestra.store.database import Store
from palestra.store.databases import Driver
from palestra.types.episode_rows import Change, EpisodeRow, Gone, GroupRow, Key, Row, RunRow, SavedRows, Tombstone

R = TypeVar("R", RunRow, GroupRow, EpisodeRow, Tombstone)

FEW, LARGE_BYTES = 8, 1 << 16  # changes, and all of them: more is not written twice
MANY, MOST_BYTES = 256, 1 << 22  # entries of the log, and all of them: others wait while these go into the tables

TABLES: dict[type[Row], Table] = {
    RunRow: tables.episode_runs,
    GroupRow: tables.episode_groups,
    EpisodeRow: tables.episodes,
    Tombstone: tables.episode_tombstones,
}
KINDS = {kind.__name__: kind for kind in TABLES}

Newest = dict[type[Row], dict[Key, Row | None]]
"""None: gone."""

Tell = Callable[[BaseException | None], None]

_encoder = msgspec.msgpack.Encoder()
_entries = msgspec.msgpack.Decoder(list[Change])


class EpisodeWriter:
    """The board's way to disk, one write after another. Lives on one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._logged: list[Sequence[Change]] | None = None
        """All that is in the log. None: it has to be read, it may hold something of an earlier server, or of a write
        that failed."""
        self._count, self._bytes = MANY, 0
        """Of entries since the log was emptied: the first write does that."""

    def begin_save(self, loop: asyncio.AbstractEventLoop, changes: Sequence[Change], tell: Tell) -> None:
        """Told on the loop, as by `Store.begin_write`."""
        if len(changes) <= FEW and self._count < MANY and self._bytes < MOST_BYTES:
            entry = _encoder.encode(changes)
            if len(entry) <= LARGE_BYTES:
                self._count += 1
                self._bytes += len(entry)
                if self._logged is not None:
                    self._logged.append(changes)
                self._store.begin_write(loop, partial(log_entry, entry=entry), tell, is_one_statement=True)
                return
        logged, self._logged, self._count, self._bytes = self._logged, [], 0, 0
        self._store.begin_write(loop, partial(save_changes, changes=changes, logged=logged), tell)

    def failed(self) -> None:
        """A write, and nothing is known of it."""
        self._logged = None


def log_entry(driver: Driver, entry: bytes) -> None:
    driver.cursor.execute(_APPEND[driver.mark], (entry,))


def save_changes(
    driver: Driver, changes: Sequence[Change], *, logged: Sequence[Sequence[Change]] | None = None
) -> None:
    """In the tables, and before them what is logged; None: that is read. Of several changes of a row the last one
    counts."""
    cursor = driver.cursor
    if logged is None:
        logged = [_entries.decode(entry) for (entry,) in cursor.execute(_LOGGED).fetchall()]
    for kind, rows in _newest((*logged, changes)).items():
        if kept := [_values(row) for row in rows.values() if row is not None]:
            cursor.executemany(_upsert(kind, driver.mark), kept)
        if gone := [(key,) if isinstance(key, str) else key for key, row in rows.items() if row is None]:
            cursor.executemany(_delete(kind, driver.mark), gone)
    if logged:
        cursor.execute(_EMPTY)


def empty_log(driver: Driver) -> None:
    """For who asks the tables."""
    save_changes(driver, ())


def load_all(conn: Connection) -> SavedRows:
    entries = conn.execute(select(_log.c.entry).order_by(_log.c.number)).scalars()
    newest = _newest(map(_entries.decode, entries))
    return SavedRows(
        runs=_fetch(conn, RunRow, newest, "settings"),
        groups=_fetch(conn, GroupRow, newest),
        episodes=_fetch(conn, EpisodeRow, newest, "losses"),
        tombstones=_fetch(conn, Tombstone, newest),
    )


def _newest(entries: Iterable[Sequence[Change]]) -> Newest:
    newest: Newest = {}
    for changes in entries:
        for one in changes:
            if isinstance(one, Gone):
                newest.setdefault(KINDS[one.kind], {})[one.key] = None
            else:
                newest.setdefault(type(one), {})[one.key] = one
    return newest


def _values(row: Row) -> list[Any]:
    """In the order of the record's fields: enums as their text, lists and records as JSON."""
    values = list(msgspec.structs.astuple(row))
    for place, encoded in _encoders(type(row)):
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


def _fetch(conn: Connection, kind: type[R], newest: Newest, encoded: str | None = None) -> list[R]:
    """`encoded`: the column that holds JSON. Not by SQLAlchemy's mappings: there may be 100,000, and a start waits."""
    names, tag = kind.__struct_fields__, kind.__struct_config__.tag
    place = None if encoded is None else names.index(encoded)
    logged = newest.get(kind, {})
    found: list[R] = []
    for row in conn.execute(select(*(TABLES[kind].c[name] for name in names))):
        values = [tag, *row]
        if place is not None:
            values[place + 1] = msgspec.json.decode(row[place])
        one = msgspec.convert(values, kind)
        if one.key not in logged:
            found.append(one)
    return found + [one for one in logged.values() if one is not None]  # type: ignore[return-value]


_log = tables.episode_log
_LOGGED = f"SELECT entry FROM {_log.name} ORDER BY number"
_EMPTY = f"DELETE FROM {_log.name}"


_APPEND = {mark: f"INSERT INTO {_log.name} (entry) VALUES ({mark})" for mark in ("?", "%s")}


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
