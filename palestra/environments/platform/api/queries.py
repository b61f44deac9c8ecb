"""SQL on an instance, for callers that may look behind the tools: remote verifiers, people.

Reading uses a copy, since Fleet's SDK lists all tables and would take ours for changes of the agent.
"""

from __future__ import annotations

import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NotRequired, TypedDict

from palestra.environments.platform.changes import Change, ChangeKind, changes, tables_of
from palestra.environments.platform.diff_records import TableDiff
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.verifiers.runtime.memory import part_of

MAX_COPIES = 64  # of the instances that were read last
MAX_ROWS = 100_000
MAX_VALUE_BYTES = 256 << 10  # several times the longest text of a tool; `instr` of two of them takes a second
MAX_PATTERN = 1000  # of LIKE and GLOB: longer ones run for minutes, and cannot be interrupted
MAX_RESULT_BYTES = 32 << 20
MAX_QUERY_S = 1.0  # other requests wait meanwhile
LOOK_EVERY = 100  # steps of SQLite's machine between checks of the clock
PRAGMAS = frozenset({"table_info", "table_xinfo", "index_list", "index_info", "foreign_key_list"})
REFUSED = frozenset(
    {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_SAVEPOINT}
)
WRITES = frozenset({sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE})
READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})


class QueryAnswer(TypedDict):
    """Rows of a query, or why it failed."""

    success: bool
    columns: list[str] | None
    rows: list[tuple[Any, ...]] | None
    rows_affected: NotRequired[int]
    last_insert_id: NotRequired[int | None]
    error: NotRequired[str]
    message: str


class ColumnInfo(TypedDict):
    name: str
    type: str
    notnull: bool
    default_value: object
    primary_key: bool
    pk: int
    """As `primary_key`: the SDK reads both."""


class TableDescription(TypedDict):
    name: str
    sql: str
    columns: list[ColumnInfo]


class IgnoreLists(TypedDict, total=False):
    """What a diff leaves out."""

    tables: list[str] | None
    fields: list[str] | None
    table_fields: dict[str, list[str]] | None


Authorizer = Callable[[int, str | None, str | None, str | None, str | None], int]


def _stripped(data: bytes) -> sqlite3.Connection:
    """Returns the database without triggers and without the platform's own tables."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.deserialize(data)
    named = "SELECT type, name FROM sqlite_master WHERE type = 'trigger' OR (type = 'table' AND name GLOB '[_]*')"
    # triggers refer to tables, so they are dropped first
    for kind, name in sorted(connection.execute(named).fetchall(), reverse=True):
        connection.execute(f'DROP {kind} "{name}"')
    return connection


class DatabaseCopies:
    """Copies to read from; a copy is made again when its instance has changed."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, ...], tuple[sqlite3.Connection, int, sqlite3.Connection]] = OrderedDict()

    def of(self, name: str, resource: str, instance: Instance, part: str = "") -> sqlite3.Connection:
        """`resource`: current or seed. `part`: an app of a world, of which only the tables are visible, under their own
        names."""
        source, key = instance.connection, (name, resource, part)
        known = self._kept.get(key)
        if known is not None and known[0] is source and known[1] == source.total_changes:
            self._kept.move_to_end(key)
            return known[2]
        data = instance.seed.data if resource == "seed" else instance.snapshot()
        made = _stripped(part_of(data, part) if part else data)
        made.set_authorizer(_reading)
        self._kept[key] = (source, source.total_changes, made)
        while len(self._kept) > MAX_COPIES:
            self._kept.popitem(last=False)
        return made


def read(copy: sqlite3.Connection, query: str, args: object) -> QueryAnswer:
    with _limited(copy):
        return _error_text(copy, query, args)


def write(instance: Instance, query: str, args: object) -> QueryAnswer:
    """Writes to the instance itself: this counts as a change like any other."""
    with instance.transaction() as connection:
        connection.set_authorizer(_writing(instance))
        try:
            with _limited(connection):
                return _error_text(connection, query, args)
        finally:
            connection.set_authorizer(None)


@contextmanager
def _limited(connection: sqlite3.Connection) -> Iterator[None]:
    spec = {
        sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
        sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: MAX_PATTERN,
    }
    before = {limit: connection.setlimit(limit, value) for limit, value in spec.items()}
    try:
        yield
    finally:
        for limit, value in before.items():
            connection.setlimit(limit, value)


def _error_text(connection: sqlite3.Connection, query: str, args: object) -> QueryAnswer:
    until = time.monotonic() + MAX_QUERY_S
    connection.set_progress_handler(lambda: time.monotonic() > until, LOOK_EVERY)
    try:
        cursor = connection.execute(query, _values(args))
        rows = _fetched(cursor)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as e:
        answer = f"the query took longer than {MAX_QUERY_S:g} s" if str(e) == "interrupted" else str(e)
        return {
            "success": False,
            "columns": None,
            "rows": None,
            "error": answer,
            "message": f"the query failed: {answer}",
        }
    finally:
        connection.set_progress_handler(None, 0)
    columns = [column[0] for column in cursor.description or ()]
    return {
        "success": True,
        "columns": columns,
        "rows": rows,
        "rows_affected": max(cursor.rowcount, 0),
        "last_insert_id": cursor.lastrowid,
        "message": f"{len(rows)} rows",
    }


def _fetched(cursor: sqlite3.Cursor) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    room = MAX_RESULT_BYTES
    for row in cursor:
        rows.append(row)
        room -= sum(len(value) for value in row if isinstance(value, str | bytes))
        if len(rows) > MAX_ROWS or room < 0:
            raise ValueError(
                f"the result has more than {MAX_ROWS} rows or {MAX_RESULT_BYTES >> 20} MiB; select fewer with LIMIT"
            )
    return rows


def _values(args: object) -> tuple[Any, ...]:
    if args is None:
        return ()
    if not isinstance(args, list):
        raise ValueError("args must be a list of values")
    return tuple(args)


def _reading(action: int, one: str | None, _two: str | None, _database: str | None, _source: str | None) -> int:
    if action == sqlite3.SQLITE_PRAGMA:
        return sqlite3.SQLITE_OK if one in PRAGMAS else sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY


def _writing(instance: Instance) -> Authorizer:
    """Allows rows of the app's tables; its triggers may write to ours."""

    def authorizer(action: int, one: str | None, two: str | None, database: str | None, source: str | None) -> int:
        if source is not None:
            return sqlite3.SQLITE_OK
        is_ours = one is not None and one.startswith("_")
        if action in WRITES:
            is_free = not is_ours and one not in instance.app.fixed and not (one or "").startswith("sqlite_")
            return sqlite3.SQLITE_OK if is_free else sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_DENY if is_ours else _reading(action, one, two, database, source)

    return authorizer


def describe(copy: sqlite3.Connection) -> list[TableDescription]:
    found: list[TableDescription] = []
    for name, sql in copy.execute(
        "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT GLOB 'sqlite_*' ORDER BY name"
    ).fetchall():
        columns = copy.execute(f'PRAGMA table_info("{name}")').fetchall()
        found.append({"name": name, "sql": sql, "columns": [_column(*column) for column in columns]})
    return found


def _column(_place: int, name: str, kind: str, notnull: int, default: object, key: int) -> ColumnInfo:
    return {
        "name": name,
        "type": kind,
        "notnull": bool(notnull),
        "default_value": default,
        "primary_key": key > 0,
        "pk": key,
    }


def structured_diff(instance: Instance, ignore: IgnoreLists, part: str = "") -> dict[str, TableDiff]:
    """Returns the changes by table, as Fleet's runner does; tables without changes are left out. `part`: as in
    `DatabaseCopies`."""
    tables, fields = set(ignore.get("tables") or ()), set(ignore.get("fields") or ())
    table_fields = ignore.get("table_fields") or {}
    prefix = f"{part}_" if part else ""
    seen = {table.name: table.name.removeprefix(prefix) for table in tables_of(instance.connection)}
    keys = {table.name: table.key for table in tables_of(instance.connection)}
    ignored = {name: fields | set(table_fields.get(seen[name]) or ()) for name in keys}
    found: dict[str, TableDiff] = {}
    for change in changes(instance.connection, ignored):
        name = seen[change.table]
        if change.table.startswith(prefix) and name not in tables:
            _add(found.setdefault(name, _table(name, keys[change.table])), change)
    return found


def _table(name: str, key: tuple[str, ...]) -> TableDiff:
    return {
        "table_name": name,
        "primary_key": list(key),
        "added_rows": [],
        "removed_rows": [],
        "modified_rows": [],
        "unchanged_count": 0,
        "total_changes": 0,
    }


def _add(table: TableDiff, change: Change) -> None:
    row_id = change.key[0] if len(change.key) == 1 else list(change.key)
    table["total_changes"] += 1
    match change.kind:
        case ChangeKind.INSERT:
            table["added_rows"].append({"row_id": row_id, "data": change.after})
        case ChangeKind.DELETE:
            table["removed_rows"].append({"row_id": row_id, "data": change.before})
        case ChangeKind.UPDATE:
            changed = {name: {"before": change.before[name], "after": change.after[name]} for name in change.fields}
            table["modified_rows"].append({"row_id": row_id, "changes": changed, "data": change.after})
