"""An app: tables, what fills them, tools, task templates; and the seed databases that templates make their tasks from.

These are plain data; `seeds.py` builds databases, `tasks.py` makes tasks, instances do the work.
"""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from enum import StrEnum
from typing import Protocol

import msgspec

from palestra.environments.platform.app_namespaces import TableNames, table_names, variables_of
from palestra.environments.platform.changes import Row
from palestra.environments.platform.expectations import Expected
from palestra.environments.platform.people import Cast
from palestra.environments.platform.scripted_user import caller_variable
from palestra.environments.platform.task_templates import ExpectedAnswer, Params, RequiredCalls, Solution, read_prompts
from palestra.environments.platform.tool_schemas import PlatformTool
from palestra.types.openai import ChatTool
from palestra.util.json_types import JsonMapping


class SeedSize(StrEnum):
    """How much data a seed database has."""

    TINY = "tiny"
    SMALL = "small"
    LARGE = "large"


class SubGoals(Protocol):
    """The parts of which a task is composed, in their order."""

    def expect(self, params: Params, seed: SeedDatabase) -> list[list[Expected]]:
        """Returns what must change, by sub-goal."""
        ...

    def solve(self, params: Params) -> list[Solution]:
        """Returns solutions that can be played in any order."""
        ...

    def another(self, rng: random.Random, params: Params, seed: SeedDatabase, number: int) -> Solution | None:
        """Returns a solution of a request as that of this sub-goal, about something else; None if none is found."""
        ...


class TaskTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """Makes a prompt, a solution and its expected result from a random number and a seed database."""

    name: str
    difficulty: str
    """0a to 0d for the smallest tasks, then 0, 1, 2, 3."""
    params: Callable[[random.Random, SeedDatabase], Params | None]
    """Returns None if this choice is impossible: there is no such row, or more than one. Then another one is tried."""
    prompts: Sequence[str]
    """Paraphrases, with `{names}` of the params."""
    solve: Callable[[Params], Solution]
    expect: Callable[[Params, SeedDatabase], list[Expected]]
    """What must have changed in the end; empty: nothing may change."""
    answer: Callable[[Params], ExpectedAnswer] | None = None
    process: Callable[[Params], RequiredCalls] | None = None
    """Tools that must have been called, for tasks that only read."""
    must_not: bool = False
    """Whether the data asks for something that must not be done."""
    size: str = "small"
    max_turns: int = 10
    goals: SubGoals | None = None
    """The parts of a long task."""
    variables: Callable[[Params], Mapping[str, str]] | None = None
    """Variables of the task's instance besides those of its world."""
    failing_percent: int = 0
    """How many of a hundred calls fail for the moment."""
    has_own_eval_worlds: bool = False
    """Whether tasks for evaluation are in worlds in which no training task is."""

    def prompt(self, params: JsonMapping, rng: random.Random) -> str:
        return rng.choice(self.prompts).format_map(params)


def no_change(_params: Params, _seed: SeedDatabase) -> list[Expected]:
    return []


USER_TURNS = 30  # more than the patience of any user and the calls of any solution


def _caller_of(params: Params) -> Mapping[str, str]:
    return caller_variable(params["caller"], params["draw"])


class TemplateMaker:
    """Makes the templates of an app, whose prompts are in the `prompts.toml` of its package, by template."""

    def __init__(self, package: str, *, users: bool = False) -> None:
        """`users`: all tasks of the package have a user on the line, and share the prompts `user`."""
        self._prompts, self._users = read_prompts(package), users

    def __call__(
        self,
        difficulty: str,
        *,
        params: Callable[[random.Random, SeedDatabase], Params | None],
        expect: Callable[[Params, SeedDatabase], list[Expected]] = no_change,
        answer: Callable[[Params], ExpectedAnswer] | None = None,
        process: Callable[[Params], RequiredCalls] | None = None,
        prompts: str | None = None,
        must_not: bool = False,
        size: SeedSize = SeedSize.SMALL,
        max_turns: int = 10,
    ) -> Callable[[Callable[[Params], Solution]], TaskTemplate]:
        """Decorates the solution, whose name is the template's. `prompts` names the template that has them, if it is
        another."""

        def made(solve: Callable[[Params], Solution]) -> TaskTemplate:
            name = solve.__name__
            if self._users:
                return TaskTemplate(
                    name=name,
                    difficulty=difficulty,
                    params=params,
                    prompts=self._prompts["user"],
                    solve=solve,
                    expect=expect,
                    variables=_caller_of,
                    has_own_eval_worlds=True,
                    size=size,
                    max_turns=USER_TURNS,
                )
            return TaskTemplate(
                name=name,
                difficulty=difficulty,
                params=params,
                prompts=self._prompts[prompts or name],
                solve=solve,
                expect=expect,
                answer=answer,
                process=process,
                must_not=must_not,
                size=size,
                max_turns=max_turns,
            )

        return made


class TaskApp(msgspec.Struct, frozen=True, kw_only=True):
    """A task app: its schema, how a world is filled, its tools and its task templates."""

    key: str
    title: str
    description: str
    version: str
    """The version of schema and seeds together: another version is another world."""
    schema: str
    fill: Callable[[sqlite3.Connection, random.Random, SeedSize], Mapping[str, str]]
    """Puts rows into new tables, the same for the same numbers; returns the variables of a task in this world:
    LOGGED_IN_USER, LOGGED_IN_NAME, CURRENT_DATE."""
    fill_with: Callable[[sqlite3.Connection, random.Random, SeedSize, Cast], Mapping[str, str]] | None = None
    """The same with given people and a given day; None: it cannot be part of a world."""
    parts: tuple[TaskApp, ...] = ()
    """The apps of a world of several, in one database (`worlds.py`)."""
    tools: tuple[PlatformTool, ...]
    templates: tuple[TaskTemplate, ...]
    sub_goals: tuple[TaskTemplate, ...] = ()
    """Templates that are only parts of long tasks."""
    long_templates: tuple[TaskTemplate, ...] = ()
    """Templates of long tasks, which are drawn only by name or difficulty."""
    has_users: bool = False
    """Whether there is a user to talk to (`scripted_user.py`)."""
    fixed: Set[str] = frozenset()
    """Tables that no tool writes: they are not watched for changes."""
    volatile: Mapping[str, Set[str]] = {}
    """Columns that no task checks, by table."""

    @property
    def instructions(self) -> str:
        """Instructions for models that connect by MCP."""
        return f"{self.title}: {self.description}"

    def tool(self, name: str) -> PlatformTool | None:
        return next((tool for tool in self.tools if tool.name == name), None)

    def template(self, name: str) -> TaskTemplate | None:
        return next((one for one in (*self.templates, *self.long_templates) if one.name == name), None)

    def openai_tools(self) -> list[ChatTool]:
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in self.tools
        ]


class SeedDatabase(msgspec.Struct, frozen=True):
    """A database that was built for an app, a number and a size; instances begin as copies of it."""

    app: TaskApp
    number: int
    size: SeedSize
    data: bytes
    """The database, ready to be deserialized."""
    digest: str
    variables: Mapping[str, str]
    connection: sqlite3.Connection
    """A shared connection for reading; it is never written to."""
    lock: threading.Lock
    """Protects the connection."""
    names: TableNames | None = None
    """Names of the app's tables if it is one of several."""

    @property
    def key(self) -> str:
        """Fleet's `data_key`: together with the app it identifies the world."""
        return f"{self.size}-{self.number}"

    def rows(self, query: str, *args: object) -> list[Row]:
        query = self.names.in_statement(query) if self.names else query
        with self.lock:
            cursor = self.connection.execute(query, args)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def part(self, key: str) -> SeedDatabase:
        """Returns the database as an app of this world sees it."""
        (app,) = (app for app in self.app.parts if app.key == key)
        names = table_names(key, app.schema)
        return msgspec.structs.replace(self, app=app, variables=variables_of(key, self.variables), names=names)
