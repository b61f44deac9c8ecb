"""Changes of an instance: triggers store each row's first image, so a diff costs as much as was changed, not as
much as there is.

An update that is undone, or a row that is deleted and inserted again unchanged, is no change.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Set
from enum import StrEnum
from typing import Any

import msgspec

from palestra.util.json_types import JsonObject

Row = JsonObject

HIDDEN = """
CREATE TABLE _changes (tbl TEXT NOT NULL, pk TEXT NOT NULL, before TEXT, PRIMARY KEY (tbl, pk)) WITHOUT ROWID;
CREATE TABLE _events (turn INTEGER PRIMARY KEY, call TEXT NOT NULL, error TEXT NOT NULL);
CREATE TABLE _facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


class ChangeKind(StrEnum):
    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"


class Change(msgspec.Struct, frozen=True):
    table: str
    kind: ChangeKind
    key: tuple[Any, ...]
    before: Row
    """Empty for an insert."""
    after: Row
    """Empty for a delete."""
    fields: tuple[str, ...] = ()
    """The columns that differ, in an update."""


class TableInfo(msgspec.Struct, frozen=True):
    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]


def tables_of(connection: sqlite3.Connection) -> list[TableInfo]:
    """Returns the app's own tables."""
    names = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' "
        "AND name NOT LIKE '\\_%' ESCAPE '\\' ORDER BY name"
    ).fetchall()
    return [_table(connection, name) for (name,) in names]


def _table(connection: sqlite3.Connection, name: str) -> TableInfo:
    found = connection.execute(f'PRAGMA table_info("{name}")').fetchall()
    key = tuple(column[1] for column in sorted((c for c in found if c[5]), key=lambda c: c[5]))
    if not key:
        raise ValueError(f"table {name} has no primary key, so changes of its rows cannot be told apart")
    return TableInfo(name, tuple(column[1] for column in found), key)


def watch(connection: sqlite3.Connection, fixed: Set[str] = frozenset()) -> None:
    """Records changes from now on. The triggers are part of the database, and of every copy of it; each connection
    reads them all before its first query (1.5 ms for 50), so tables that are `fixed` have none."""
    connection.executescript(HIDDEN)
    for table in tables_of(connection):
        name = table.name
        if name in fixed:
            continue
        for event, images in (("INSERT", ("NEW",)), ("UPDATE", ("OLD", "NEW")), ("DELETE", ("OLD",))):
            notes = ";".join(_note(table, image) for image in images)
            connection.execute(f'CREATE TRIGGER "_{name}_{event}" AFTER {event} ON "{name}" BEGIN {notes}; END')


def _note(table: TableInfo, image: str) -> str:
    """Returns SQL that notes a row's first image, without OR IGNORE: inside a trigger the conflict handling of the
    outer statement applies."""
    key, before = _key_of(table, image), _image(table) if image == "OLD" else "NULL"
    known = f"SELECT 1 FROM _changes WHERE tbl = '{table.name}' AND pk = {key}"
    return f"INSERT INTO _changes SELECT '{table.name}', {key}, {before} WHERE NOT EXISTS ({known})"


def _key_of(table: TableInfo, image: str) -> str:
    columns = ", ".join(f'{image}."{column}"' for column in table.key)
    return f"json_array({columns})"


def _image(table: TableInfo) -> str:
    columns = ", ".join(f"'{column}', OLD.\"{column}\"" for column in table.columns)
    return f"json_object({columns})"


def changes(connection: sqlite3.Connection, ignored: Mapping[str, Set[str]]) -> list[Change]:
    """Returns net changes by table and key, without the columns of a table that are `ignored` (such as a time of the
    last change)."""
    noted = connection.execute("SELECT tbl, pk, before FROM _changes ORDER BY tbl, pk").fetchall()
    tables = {name: _table(connection, name) for name in {name for name, _, _ in noted}}
    found = (_net(connection, tables[name], pk, before, ignored.get(name, frozenset())) for name, pk, before in noted)
    return [change for change in found if change is not None]


def _net(
    connection: sqlite3.Connection, table: TableInfo, pk: str, before: str | None, ignored: Set[str]
) -> Change | None:
    key = tuple(msgspec.json.decode(pk))
    was = _without(msgspec.json.decode(before) if before is not None else {}, ignored)
    now = _without(row_at(connection, table, key), ignored)
    if was and now:
        differ = tuple(c for c in was if was[c] != now[c])
        return Change(table.name, ChangeKind.UPDATE, key, was, now, differ) if differ else None
    if now:
        return Change(table.name, ChangeKind.INSERT, key, {}, now)
    return Change(table.name, ChangeKind.DELETE, key, was, {}) if was else None


def _without(row: Row, ignored: Set[str]) -> Row:
    return {name: value for name, value in row.items() if name not in ignored}


def row_at(connection: sqlite3.Connection, table: TableInfo, key: tuple[Any, ...]) -> Row:
    where = " AND ".join(f'"{column}" = ?' for column in table.key)
    found = connection.execute(f'SELECT * FROM "{table.name}" WHERE {where}', key).fetchone()
    return dict(zip(table.columns, found, strict=True)) if found else {}


def compared(seed: sqlite3.Connection, current: sqlite3.Connection, ignored: Mapping[str, Set[str]]) -> list[Change]:
    """Computes the same by comparing every row of both: slow, and right whatever the triggers do. For tests and
    audits."""
    found: list[Change] = []
    for table in tables_of(current):
        unseen = ignored.get(table.name, frozenset())
        was, now = _rows(seed, table, unseen), _rows(current, table, unseen)
        for key in sorted(was.keys() | now.keys(), key=msgspec.json.encode):
            before, after = was.get(key, {}), now.get(key, {})
            differ = tuple(c for c in before if before[c] != after.get(c))
            if before and after and not differ:
                continue
            kind = ChangeKind.UPDATE if before and after else ChangeKind.INSERT if after else ChangeKind.DELETE
            found.append(Change(table.name, kind, key, before, after, differ if before and after else ()))
    return found


def _rows(connection: sqlite3.Connection, table: TableInfo, ignored: Set[str]) -> dict[tuple[Any, ...], Row]:
    rows = (dict(zip(table.columns, row, strict=True)) for row in connection.execute(f'SELECT * FROM "{table.name}"'))
    return {tuple(row[column] for column in table.key): _without(row, ignored) for row in rows}
