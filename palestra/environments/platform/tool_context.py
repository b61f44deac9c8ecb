"""The context of a tool: the instance's tables, the clock, who is logged in."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any

from palestra.environments.platform.app_namespaces import TableNames, variables_of
from palestra.environments.platform.changes import Row
from palestra.environments.platform.errors import ToolError

MAX_PAGE = 50


class ToolContext:
    def __init__(
        self, connection: sqlite3.Connection, variables: Mapping[str, str], now: str, names: TableNames | None = None
    ) -> None:
        """`names` are those of an app's tables if it is one of several."""
        self._connection, self.variables, self.now, self._names = connection, variables, now, names

    def of_part(self, app: str, names: TableNames) -> ToolContext:
        """Returns the same context, as an app of this world sees it."""
        return ToolContext(self._connection, variables_of(app, self.variables), self.now, names)

    @property
    def me(self) -> str:
        return self.variables["LOGGED_IN_USER"]

    @property
    def today(self) -> str:
        return self.now[:10]

    def rows(self, query: str, *args: object) -> list[Row]:
        cursor = self._execute(query, args)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    def first(self, query: str, *args: object) -> Row | None:
        found = self.rows(query, *args)
        return found[0] if found else None

    def found(self, missing: str, hint: str, query: str, *args: object) -> Row:
        """Returns the first row. Raises ToolError, which says what is missing and how to find it."""
        found = self.first(query, *args)
        if found is None:
            raise ToolError("not_found", missing, hint)
        return found

    def value(self, query: str, *args: object) -> Any:
        found = self._execute(query, args).fetchone()
        return found[0] if found else None

    def run(self, query: str, *args: object) -> int:
        """Returns how many rows were changed."""
        return self._execute(query, args).rowcount

    def insert(self, table: str, **values: object) -> int:
        """Inserts a row and returns its id."""
        columns, marks = ", ".join(values), ", ".join("?" * len(values))
        cursor = self._execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", tuple(values.values()))
        return int(cursor.lastrowid or 0)

    def _execute(self, query: str, args: tuple[object, ...]) -> sqlite3.Cursor:
        return self._connection.execute(self._names.in_statement(query) if self._names else query, args)

    def page(self, query: str, *args: object, limit: int, cursor: str | None) -> tuple[list[Row], str | None]:
        """Returns a page of a query with a total order, and where the next one begins, if there is one."""
        if not 1 <= limit <= MAX_PAGE:
            raise ToolError("bad_arguments", f"limit must be 1 to {MAX_PAGE}", "use cursor for the next page")
        start = page_start(cursor)
        found = self.rows(f"{query} LIMIT ? OFFSET ?", *args, limit + 1, start)
        return found[:limit], str(start + limit) if len(found) > limit else None


def page_start(cursor: str | None) -> int:
    if cursor is not None and (not cursor.isdecimal() or len(cursor) > 9):
        raise ToolError("bad_cursor", f"{cursor!r} is no cursor of this tool", "use next_cursor as it was given")
    return int(cursor or 0)


def check_text(name: str, text: str, limit: int = 20_000) -> None:
    if not text.strip() or len(text) > limit:
        raise ToolError("bad_arguments", f"{name} must have 1 to {limit} characters")
