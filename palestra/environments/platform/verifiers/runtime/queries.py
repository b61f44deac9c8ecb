"""The query builder of Fleet's SDK, as verifiers use it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from palestra.environments.platform.verifiers.runtime.memory import MemoryDatabase, Row
from palestra.util.json_types import JsonMapping


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
    """Each method but the last returns another query, and does not change this one."""

    def __init__(self, database: MemoryDatabase, table: str) -> None:
        self._database, self._table = database, table
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

    def where(self, expected: JsonMapping) -> QueryBuilder:
        found = self
        for column, value in expected.items():
            found = found.eq(column, value)
        return found

    # Answers

    def all(self) -> list[Row]:
        return self._database.rows(self._query(), self._args)

    def first(self) -> Row | None:
        found = self.limit(1).all()
        return found[0] if found else None

    def count(self) -> Count:
        found = self.select("COUNT(*) AS n").limit(None)
        return Count(self._database.rows(found._query(), self._args)[0]["n"])

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
