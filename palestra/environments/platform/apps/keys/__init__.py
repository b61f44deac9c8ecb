"""`keys`: named numbers and a list of them, for models that learn to call a tool at all.

The levels of its tasks: 0a there is only one possible call; 0b copy a number from the prompt; 0c choose the tool by the
verb; 0d two calls; 1 read an observation and copy out of it.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Mapping

from palestra.environments.platform.app import SeedDatabase, SeedSize, TaskApp, TemplateMaker
from palestra.environments.platform.apps.keys.sub_goals import SUB_GOALS
from palestra.environments.platform.changes import Row
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.expectations import DeletedRow, Expected, InsertedRow, UpdatedRow
from palestra.environments.platform.task_templates import (
    AnswerKind,
    ExpectedAnswer,
    Params,
    RequiredCalls,
    Solution,
    SolutionCall,
)
from palestra.environments.platform.tool_context import ToolContext
from palestra.environments.platform.tool_schemas import ToolOutput, tool

template = TemplateMaker("palestra.environments.platform.apps.keys")

SCHEMA = """
CREATE TABLE items (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE numbers (id INTEGER PRIMARY KEY AUTOINCREMENT, value INTEGER NOT NULL);
"""
NAMES = "abcdefgh"
COUNT = {SeedSize.TINY: 4, SeedSize.SMALL: 6, SeedSize.LARGE: 8}
MAX_ROWS = 1000  # of a table, so that an agent in a loop is stopped


def fill(connection: sqlite3.Connection, rng: random.Random, size: SeedSize) -> Mapping[str, str]:
    names = sorted(rng.sample(NAMES, COUNT[size]))
    for name, value in zip(names, rng.sample(range(100), len(names)), strict=True):
        connection.execute("INSERT INTO items VALUES (?, ?)", (name, value))
    return {"LOGGED_IN_USER": "1", "LOGGED_IN_NAME": "Ada", "CURRENT_DATE": "2026-03-02"}


# Tools


@tool(name="list")
def list_items(context: ToolContext) -> ToolOutput:
    """List all items."""
    return {row["name"]: row["value"] for row in context.rows("SELECT * FROM items ORDER BY name")}


@tool(name="get")
def get_item(context: ToolContext, name: str) -> ToolOutput:
    """Read an item's value."""
    return _found(context, name)


@tool(name="set", writes=True)
def set_item(context: ToolContext, name: str, value: int) -> ToolOutput:
    """Give an item a value; a new name makes a new item."""
    if not 0 < len(name) <= 32:
        raise ToolError("bad_arguments", "a name has 1 to 32 characters")
    context.run("INSERT INTO items VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", name, value)
    _check_room(context, "items")
    return _found(context, name)


@tool(name="drop", writes=True)
def drop_item(context: ToolContext, name: str) -> ToolOutput:
    """Remove an item."""
    found = _found(context, name)
    context.run("DELETE FROM items WHERE name = ?", name)
    return {"dropped": found["name"]}


@tool(name="put", writes=True)
def write_number(context: ToolContext, value: int) -> ToolOutput:
    """Write a number down."""
    context.insert("numbers", value=value)
    _check_room(context, "numbers")
    return {"put": value}


def _found(context: ToolContext, name: str) -> Row:
    return context.found(f"there is no item {name!r}", "list() shows them", "SELECT * FROM items WHERE name = ?", name)


def _check_room(context: ToolContext, table: str) -> None:
    if context.value(f"SELECT count(*) FROM {table}") > MAX_ROWS:
        raise ToolError("full", f"there is room for {MAX_ROWS} {table}")


# Tasks


def _put(value: int) -> InsertedRow:
    return InsertedRow("numbers", {"value": value})


def _any_item(rng: random.Random, seed: SeedDatabase) -> tuple[str, int]:
    row = rng.choice(seed.rows("SELECT name, value FROM items ORDER BY name"))
    return row["name"], row["value"]


@template(
    "0a",
    params=lambda _rng, _seed: {},
    process=lambda _params: RequiredCalls(("list",), only=True),
    size=SeedSize.TINY,
    max_turns=2,
)
def list_all(_params: Params) -> Solution:
    yield SolutionCall("list")


@template(
    "0b",
    params=lambda rng, _seed: {"value": rng.randrange(100)},
    expect=lambda params, _seed: [_put(params["value"])],
    size=SeedSize.TINY,
    max_turns=2,
)
def put_number(params: Params) -> Solution:
    yield SolutionCall("put", {"value": params["value"]})


VERBS = {
    "put": ("Put {value}.", "Write {value}.", "Note {value}."),
    "drop": ("Drop {name}.", "Remove {name}.", "Delete {name}."),
    "set": ("Set {name} to {value}.", "Make {name} {value}.", "Let {name} be {value}."),
    "list": ("List all.", "Show all.", "List items."),
}


def _verb_params(rng: random.Random, seed: SeedDatabase) -> Params | None:
    name, item = _any_item(rng, seed)
    value, verb = rng.randrange(100), rng.choice(sorted(VERBS))
    if verb == "set" and value == item:
        return None  # doing nothing would be right
    return {"verb": verb, "name": name, "value": value, "text": rng.choice(VERBS[verb]).format(name=name, value=value)}


def _verb_call(params: Params) -> SolutionCall:
    taken = {"put": ("value",), "drop": ("name",), "set": ("name", "value"), "list": ()}[params["verb"]]
    return SolutionCall(params["verb"], {argument: params[argument] for argument in taken})


def _verb_expect(params: Params, _seed: SeedDatabase) -> list[Expected]:
    key = (params["name"],)
    match params["verb"]:
        case "put":
            return [_put(params["value"])]
        case "drop":
            return [DeletedRow("items", key)]
        case "set":
            return [UpdatedRow("items", key, {"value": params["value"]})]
        case _:
            return []


@template(
    "0c",
    params=_verb_params,
    expect=_verb_expect,
    process=lambda params: RequiredCalls((params["verb"],)),
    size=SeedSize.TINY,
    max_turns=2,
)
def by_verb(params: Params) -> Solution:
    yield _verb_call(params)


def _put_and_drop(rng: random.Random, seed: SeedDatabase) -> Params:
    return {"name": _any_item(rng, seed)[0], "value": rng.randrange(100)}


@template(
    "0d",
    params=_put_and_drop,
    expect=lambda params, _seed: [_put(params["value"]), DeletedRow("items", (params["name"],))],
    size=SeedSize.TINY,
    max_turns=4,
)
def put_and_drop(params: Params) -> Solution:
    yield SolutionCall("put", {"value": params["value"]})
    yield SolutionCall("drop", {"name": params["name"]})


def _value_of(rng: random.Random, seed: SeedDatabase) -> Params:
    name, value = _any_item(rng, seed)
    return {"name": name, "wanted": value}


@template("1", params=_value_of, expect=lambda params, _seed: [_put(params["wanted"])], size=SeedSize.TINY, max_turns=4)
def put_value(params: Params) -> Solution:
    result = yield SolutionCall("get", {"name": params["name"]})
    yield SolutionCall("put", {"value": result["value"]})


def _largest(_rng: random.Random, seed: SeedDatabase) -> Params:
    row = seed.rows("SELECT name FROM items ORDER BY value DESC LIMIT 1")[0]  # values of a seed are all different
    return {"wanted": row["name"]}


@template("2", params=_largest, answer=lambda params: ExpectedAnswer(AnswerKind.NAME, params["wanted"]), max_turns=4)
def largest(params: Params) -> Solution:
    result = yield SolutionCall("list")
    yield SolutionCall("submit_final_answer", {"answer": max(result, key=lambda name: result[name])})


KEYS = TaskApp(
    key="keys",
    title="Keys",
    description="Named numbers, and a list to write numbers down.",
    version="v1",
    schema=SCHEMA,
    fill=fill,
    tools=(list_items, get_item, set_item, drop_item, write_number),
    templates=(list_all, put_number, by_verb, put_and_drop, put_value, largest),
    sub_goals=SUB_GOALS,
)
