"""The two databases a verifier looks at, and asking them.

Owns: the query builder, reading rows. Never touches: files; the databases are copies in memory that refuse writes.
"""

from __future__ import annotations

import copy
import sqlite3
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palestra.environments.fleet.verifiers.sandbox.diffs import IgnoreConfig, SnapshotDiff

Row = dict[str, Any]
NAMES = (
    "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' "
    "AND name NOT IN ('_changes', '_events', '_facts') ORDER BY name"
)
"""Without what the platform keeps in its databases: a diff must not find it. `_events` can be asked for by name."""
ROLLBACK_JOURNAL = b"\x01\x01"
"""Of a database header, where a write-ahead log would be named: a copy in memory has none."""


def part_of(data: bytes, app: str) -> bytes:
    """A world's database with the tables of one of its apps alone, and without the app's name before theirs. Raises
    KeyError."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.deserialize(data)
    connection.execute("PRAGMA temp_store = MEMORY")
    made = connection.execute("SELECT type, name FROM sqlite_master WHERE type IN ('trigger', 'table')").fetchall()
    prefix = f"{app}_"
    found = sorted(((kind, name) for kind, name in made if not name.startswith("sqlite_")), reverse=True)
    if not any(kind == "table" and name.startswith(prefix) for kind, name in found):
        raise KeyError(f"there is no app {app!r} in this world")
    for kind, name in found:  # triggers name tables: they go first
        if kind == "trigger" or not name.startswith(prefix):
            connection.execute(f'DROP {kind} "{name}"')
        else:
            connection.execute(f'ALTER TABLE "{name}" RENAME TO "{name.removeprefix(prefix)}"')
    part = connection.serialize()
    connection.close()
    return part


class DatabaseSnapshot:
    def __init__(self, data: bytes, name: str) -> None:
        self.name = name
        self._connection = sqlite3.connect(":memory:")
        self._connection.deserialize(data[:18] + ROLLBACK_JOURNAL + data[20:])
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("PRAGMA temp_store = MEMORY")
        self._connection.execute("PRAGMA query_only = 1")
        self._connection.set_authorizer(_no_other_database)

    def table(self, table: str) -> QueryBuilder:
        return QueryBuilder(self, table)

    def tables(self) -> list[str]:
        return [row["name"] for row in self.rows(NAMES)]

    def part(self, app: str) -> DatabaseSnapshot:
        """As one app of a world of several knows it. Raises KeyError."""
        return DatabaseSnapshot(part_of(self._connection.serialize(), app), self.name)

    def rows(self, query: str, args: Iterable[Any] = ()) -> list[Row]:
        return [dict(row) for row in self._connection.execute(query, tuple(args))]

    def diff(self, other: DatabaseSnapshot, ignore_config: IgnoreConfig | None = None) -> SnapshotDiff:
        from palestra.environments.fleet.verifiers.sandbox.diffs import SnapshotDiff

        return SnapshotDiff(self, other, ignore_config)

    def expect_row(self, table: str, where: Mapping[str, Any], expect: Mapping[str, Any]) -> DatabaseSnapshot:
        found = self.table(table).where(where).assert_exists()
        for column, value in expect.items():
            found.assert_eq(column, value)
        return self

    def expect_rows(
        self,
        table: str,
        where: Mapping[str, Any],
        *,
        count: int | None = None,
        contains: Iterable[Mapping[str, Any]] = (),
    ) -> DatabaseSnapshot:
        found = self.table(table).where(where)
        if count is not None:
            found.count().assert_eq(count)
        for wanted in contains or ():
            if not any(all(row.get(k) == v for k, v in wanted.items()) for row in found.all()):
                raise AssertionError(f"Expected a row matching {dict(wanted)} in {table}")
        return self

    def expect_absent_row(self, table: str, where: Mapping[str, Any]) -> DatabaseSnapshot:
        self.table(table).where(where).assert_none()
        return self

    def __repr__(self) -> str:
        return f"<DatabaseSnapshot {self.name}>"


def _no_other_database(action: int, *_args: Any) -> int:
    return sqlite3.SQLITE_DENY if action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH) else sqlite3.SQLITE_OK


class Count(int):
    @property
    def value(self) -> int:
        return int(self)

    def assert_eq(self, expected: int) -> None:
        if self != expected:
            raise AssertionError(f"Expected count {expected}, found {int(self)}")

    def assert_gt(self, threshold: int) -> None:
        if self <= threshold:
            raise AssertionError(f"Expected count > {threshold}, found {int(self)}")

    def assert_between(self, low: int, high: int) -> None:
        if not low <= self <= high:
            raise AssertionError(f"Expected count between {low} and {high}, found {int(self)}")


class QueryBuilder:
    """Each method but the last gives another query, and leaves this one as it is."""

    def __init__(self, snapshot: DatabaseSnapshot, table: str) -> None:
        self._snapshot, self._table = snapshot, table
        self._columns: tuple[str, ...] = ("*",)
        self._conditions: list[str] = []
        self._args: list[Any] = []
        self._joins: list[str] = []
        self._order = ""
        self._limit: int | None = None

    def select(self, *columns: str) -> QueryBuilder:
        return self._with(_columns=columns or ("*",))

    def limit(self, n: int | None) -> QueryBuilder:
        return self._with(_limit=n)

    def sort(self, column: str, desc: bool = False) -> QueryBuilder:
        return self._with(_order=f" ORDER BY {column} {'DESC' if desc else 'ASC'}")

    def join(self, other_table: str, on: Mapping[str, str]) -> QueryBuilder:
        clauses = " AND ".join(f"{self._table}.{own} = {other_table}.{theirs}" for own, theirs in on.items())
        return self._with(_joins=[*self._joins, f" JOIN {other_table} ON {clauses}"])

    def eq(self, column: str, value: Any) -> QueryBuilder:
        return self._if(f"{column} = ?", value)

    def neq(self, column: str, value: Any) -> QueryBuilder:
        return self._if(f"{column} != ?", value)

    def gt(self, column: str, value: Any) -> QueryBuilder:
        return self._if(f"{column} > ?", value)

    def gte(self, column: str, value: Any) -> QueryBuilder:
        return self._if(f"{column} >= ?", value)

    def lt(self, column: str, value: Any) -> QueryBuilder:
        return self._if(f"{column} < ?", value)

    def lte(self, column: str, value: Any) -> QueryBuilder:
        return self._if(f"{column} <= ?", value)

    def ilike(self, column: str, pattern: str) -> QueryBuilder:
        return self._if(f"{column} LIKE ?", pattern)

    def in_(self, column: str, values: Iterable[Any]) -> QueryBuilder:
        found = list(values)
        return self._if(f"{column} IN ({', '.join('?' * len(found))})", *found)

    def not_in(self, column: str, values: Iterable[Any]) -> QueryBuilder:
        found = list(values)
        return self._if(f"{column} NOT IN ({', '.join('?' * len(found))})", *found)

    def is_null(self, column: str) -> QueryBuilder:
        return self._if(f"{column} IS NULL")

    def not_null(self, column: str) -> QueryBuilder:
        return self._if(f"{column} IS NOT NULL")

    def where(self, wanted: Mapping[str, Any]) -> QueryBuilder:
        found = self
        for column, value in wanted.items():
            found = found.eq(column, value)
        return found

    # Answers

    def all(self) -> list[Row]:
        return self._snapshot.rows(self._query(), self._args)

    def first(self) -> Row | None:
        found = self.limit(1).all()
        return found[0] if found else None

    def count(self) -> Count:
        found = self.select("COUNT(*) AS n").limit(None)
        return Count(self._snapshot.rows(found._query(), self._args)[0]["n"])

    def assert_exists(self) -> QueryBuilder:
        if self.first() is None:
            raise AssertionError(f"Expected at least one row of {self}, found none")
        return self

    def assert_none(self) -> QueryBuilder:
        if self.first() is not None:
            raise AssertionError(f"Expected no row of {self}, found some")
        return self

    def assert_eq(self, column: str, value: Any) -> QueryBuilder:
        row = self.first()
        if row is None or row.get(column) != value:
            raise AssertionError(f"Expected {column} = {value!r} in {self}, found {row and row.get(column)!r}")
        return self

    def __repr__(self) -> str:
        return f"<QueryBuilder {self._query()} {self._args}>"

    def _query(self) -> str:
        where = f" WHERE {' AND '.join(self._conditions)}" if self._conditions else ""
        limit = "" if self._limit is None else f" LIMIT {int(self._limit)}"
        return f"SELECT {', '.join(self._columns)} FROM {self._table}{''.join(self._joins)}{where}{self._order}{limit}"

    def _if(self, condition: str, *args: Any) -> QueryBuilder:
        return self._with(_conditions=[*self._conditions, condition], _args=[*self._args, *args])

    def _with(self, **changed: Any) -> QueryBuilder:
        found = copy.copy(self)
        vars(found).update(changed)
        return found
