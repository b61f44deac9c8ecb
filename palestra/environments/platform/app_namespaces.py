"""An app inside a world of several: its tables have its name as a prefix, and its own statements still find them.

Statements of apps have SQL's keywords in capitals and names in small letters, which this relies on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache

MAX_KEPT = 4096  # statements that were rewritten for a world
NAMED = re.compile(r"\b(FROM|JOIN|INTO|UPDATE) (\w+)\b( AS\b| [a-z])?")
"""A table in a statement, and the beginning of its alias."""
TABLE = re.compile(r"\bCREATE TABLE (\w+)")
DEFINED = re.compile(r"\b(CREATE TABLE|REFERENCES) (\w+)|\b(CREATE INDEX \w+) ON (\w+)")


class TableNames:
    def __init__(self, app: str, schema: str) -> None:
        self._app, self._schema, self.tables = app, schema, frozenset(TABLE.findall(schema))
        self.in_statement = lru_cache(maxsize=MAX_KEPT)(self._in_statement)

    def of(self, table: str) -> str:
        """Returns a table's name; the platform's own tables begin with `_` here, too."""
        return f"_{self._app}{table}" if table.startswith("_") else f"{self._app}_{table}"

    def _in_statement(self, query: str) -> str:
        return NAMED.sub(self._named, query)

    def _named(self, found: re.Match[str]) -> str:
        word, table, alias = found[1], found[2], found[3] or ""
        if table not in self.tables:
            return found[0]
        if not alias and word in ("FROM", "JOIN"):
            alias = f" AS {table}"  # the statement may use table.column
        return f"{word} {self.of(table)}{alias}"

    @property
    def schema(self) -> str:
        return DEFINED.sub(self._defined, self._schema)

    def _defined(self, found: re.Match[str]) -> str:
        return f"{found[1]} {self.of(found[2])}" if found[1] else f"{found[3]} ON {self.of(found[4])}"


@cache
def table_names(app: str, schema: str) -> TableNames:
    """Returns the names of an app with these tables; one object for all callers, since it caches statements."""
    return TableNames(app, schema)


def variables_of(app: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables as the app knows them: FORGE_LOGGED_IN_USER is `forge`'s LOGGED_IN_USER."""
    prefix = f"{app.upper()}_"
    own = {name.removeprefix(prefix): value for name, value in variables.items() if name.startswith(prefix)}
    return {**variables, **own}
