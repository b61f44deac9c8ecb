"""Worlds of several apps: one database, one clock, the same people everywhere; tools and tables by their app's name.

For example:

    mail.send_message    the tool `send_message` of `mail`
    mail_messages        its table `messages`
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from palestra.environments.platform.app import SeedSize, TaskApp, TaskTemplate
from palestra.environments.platform.app_namespaces import table_names
from palestra.environments.platform.changes import tables_of
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.expectations import Expected
from palestra.environments.platform.people import Cast, draw_cast
from palestra.environments.platform.task_templates import SolutionCall, SolutionPart
from palestra.environments.platform.tool_context import ToolContext
from palestra.environments.platform.tool_schemas import PlatformTool, ToolOutput

PEOPLE = {SeedSize.TINY: (4, 3), SeedSize.SMALL: (10, 8), SeedSize.LARGE: (20, 16)}
"""Number of colleagues and of others."""

Databases = Mapping[str, sqlite3.Connection]
"""The apps' databases while they are filled, each with its app's own names."""
Stitch = Callable[[Databases, random.Random, Cast], None]
"""Adds what connects them: e.g. a mail that asks for a room of that hotel."""
T = TypeVar("T")


def world_of(
    parts: Sequence[TaskApp],
    *,
    key: str,
    title: str,
    description: str,
    stitch: Stitch,
    templates: tuple[TaskTemplate, ...],
) -> TaskApp:
    """The first app's user is the world's."""

    def fill(connection: sqlite3.Connection, rng: random.Random, size: SeedSize) -> Mapping[str, str]:
        return _fill(parts, stitch, connection, rng, size)

    return TaskApp(
        key=key,
        title=title,
        description=description,
        version="-".join(["v1", *(f"{app.key}.{app.version}" for app in parts)]),
        schema="\n".join(table_names(app.key, app.schema).schema for app in parts),
        fill=fill,
        parts=tuple(parts),
        tools=tuple(_tool_of(app, tool) for app in parts for tool in app.tools),
        templates=templates,
        fixed={table_names(app.key, app.schema).of(table) for app in parts for table in app.fixed},
        volatile={
            table_names(app.key, app.schema).of(table): columns
            for app in parts
            for table, columns in app.volatile.items()
        },
    )


def part_of(table: str) -> str:
    """Returns the app that a table of a world belongs to."""
    return table.partition("_")[0]


# Tools


def _tool_of(app: TaskApp, tool: PlatformTool) -> PlatformTool:
    names = table_names(app.key, app.schema)

    def run(context: ToolContext, **arguments: object) -> ToolOutput:
        try:
            return tool.run(context.of_part(app.key, names), **arguments)
        except ToolError as e:
            raise ToolError(e.code, _by_full_names(app, e.message), _by_full_names(app, e.hint)) from None

    return replace(tool, name=f"{app.key}.{tool.name}", run=run)


def _by_full_names(app: TaskApp, text: str) -> str:
    """Replaces names of tools in a message; `join` alone is a word, `join(` is a tool."""
    found = "|".join(tool.name if "_" in tool.name else rf"{tool.name}(?=\()" for tool in app.tools)
    return re.sub(rf"\b({found})\b", rf"{app.key}.\1", text)


# Rows


def _fill(
    parts: Iterable[TaskApp], stitch: Stitch, connection: sqlite3.Connection, rng: random.Random, size: SeedSize
) -> Mapping[str, str]:
    cast = draw_cast(rng, *PEOPLE[size])
    databases: dict[str, sqlite3.Connection] = {}
    found: dict[str, str] = {}
    for app in parts:
        assert app.fill_with is not None, f"{app.key} cannot be part of a world"
        databases[app.key] = sqlite3.connect(":memory:", isolation_level=None)
        databases[app.key].executescript(app.schema)
        databases[app.key].execute("BEGIN")
        own = app.fill_with(databases[app.key], rng, size, cast)
        found |= {_variable(app, name, found, value): value for name, value in own.items()}
    stitch(databases, rng, cast)
    for app in parts:
        _copy(databases[app.key], connection, app)
        databases[app.key].close()
    return found


def _variable(app: TaskApp, name: str, known: Mapping[str, str], value: str) -> str:
    """Returns the name of a variable: its own if the value is the same for all apps."""
    return name if known.get(name, value) == value else f"{app.key.upper()}_{name}"


def _copy(source: sqlite3.Connection, target: sqlite3.Connection, app: TaskApp) -> None:
    names = table_names(app.key, app.schema)
    for table in tables_of(source):
        rows = source.execute(f'SELECT * FROM "{table.name}" ORDER BY {", ".join(table.key)}').fetchall()
        marks = ", ".join("?" * len(table.columns))
        target.executemany(f"INSERT INTO {names.of(table.name)} VALUES ({marks})", rows)


# For templates


def at(app: str, solving: SolutionPart[T]) -> SolutionPart[T]:
    """Runs a solution, or a part of one, with an app's own names."""
    result: Any = None
    while True:
        try:
            call = solving.send(result)
        except StopIteration as e:
            return e.value
        result = yield SolutionCall(f"{app}.{call.tool}", call.arguments)


def within(app: TaskApp, expected: Iterable[Expected]) -> list[Expected]:
    names = table_names(app.key, app.schema)
    return [replace(one, table=names.of(one.table)) for one in expected]
