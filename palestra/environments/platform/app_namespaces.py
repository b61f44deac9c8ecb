"""An app inside a world of several: its tables have its name before them, and its own words still find them.

Owns: names of tables and variables, statements in an app's words. Never touches: rows. Statements of apps are written
with SQL's words in capitals and names in small letters, which is what is looked for here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache

MAX_KEPT = 4096  # statements, as they are in a world
NAMED = re.compile(r"\b(FROM|JOIN|INTO|UPDATE) (\w+)\b( AS\b| [a-z])?")
"""A table in a statement, and the beginning of its alias."""
TABLE = re.compile(r"\bCREATE TABLE (\w+)")
DEFINED = re.compile(r"\b(CREATE TABLE|REFERENCES) (\w+)|\b(CREATE INDEX \w+) ON (\w+)")


class TableNames:
    def __init__(self, app: str, schema: str) -> None:
        self._app, self._schema, self.tables = app, schema, frozenset(TABLE.findall(schema))
        self.in_statement = lru_cache(maxsize=MAX_KEPT)(self._in_statement)

    def of(self, table: str) -> str:
        """What the platform keeps for itself begins with `_` here, too."""
        return f"_{self._app}{table}" if table.startswith("_") else f"{self._app}_{table}"

    def _in_statement(self, query: str) -> str:
        return NAMED.sub(self._named, query)

    def _named(self, found: re.Match[str]) -> str:
        word, table, alias = found[1], found[2], found[3] or ""
        if table not in self.tables:
            return found[0]
        if not alias and word in ("FROM", "JOIN"):
            alias = f" AS {table}"  # the statement may say table.column
        return f"{word} {self.of(table)}{alias}"

    @property
    def schema(self) -> str:
        return DEFINED.sub(self._defined, self._schema)

    def _defined(self, found: re.Match[str]) -> str:
        return f"{found[1]} {self.of(found[2])}" if found[1] else f"{found[3]} ON {self.of(found[4])}"


@cache
def table_names(app: str, schema: str) -> TableNames:
    """The names of an app with these tables; one object for all who ask, since it remembers statements."""
    return TableNames(app, schema)


def variables_of(app: str, variables: Mapping[str, str]) -> dict[str, str]:
    """As the app knows them: FORGE_LOGGED_IN_USER is `forge`'s LOGGED_IN_USER."""
    prefix = f"{app.upper()}_"
    own = {name.removeprefix(prefix): value for name, value in variables.items() if name.startswith(prefix)}
    return {**variables, **own}
