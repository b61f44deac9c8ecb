"""`keys`: named numbers and a list of them, for models that learn to call a tool at all.

The ladder of its tasks: 0a say the only thing there is to say; 0b copy a number from the prompt; 0c choose the tool by
the verb; 0d two calls; 1 read an observation and copy out of it.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Mapping

from palestra.environments.platform.app import App, Seed, Size, TemplateMaker
from palestra.environments.platform.desk import Desk
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.expectations import Deleted, Expected, Inserted, Updated
from palestra.environments.platform.templates import Answer, AnswerKind, Call, Calls, Params, Solution
from palestra.environments.platform.toolbox import tool
from palestra.util.json_types import JsonObject

template = TemplateMaker("palestra.environments.platform.apps.keys")

SCHEMA = """
CREATE TABLE items (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE numbers (id INTEGER PRIMARY KEY AUTOINCREMENT, value INTEGER NOT NULL);
"""
NAMES = "abcdefgh"
COUNT = {Size.TINY: 4, Size.SMALL: 6, Size.LARGE: 8}
MAX_ROWS = 1000  # of a table: an agent in a loop ends somewhere


def fill(connection: sqlite3.Connection, rng: random.Random, size: Size) -> Mapping[str, str]:
    names = sorted(rng.sample(NAMES, COUNT[size]))
    for name, value in zip(names, rng.sample(range(100), len(names)), strict=True):
        connection.execute("INSERT INTO items VALUES (?, ?)", (name, value))
    return {"LOGGED_IN_USER": "1", "LOGGED_IN_NAME": "Ada", "CURRENT_DATE": "2026-03-02"}


# Tools


@tool(name="list")
def list_items(desk: Desk) -> JsonObject:
    """List all items."""
    return {row["name"]: row["value"] for row in desk.rows("SELECT * FROM items ORDER BY name")}


@tool(name="get")
def get_item(desk: Desk, name: str) -> JsonObject:
    """Read an item's value."""
    return _found(desk, name)


@tool(name="set", writes=True)
def set_item(desk: Desk, name: str, value: int) -> JsonObject:
    """Give an item a value; a new name makes a new item."""
    if not 0 < len(name) <= 32:
        raise ToolError("bad_arguments", "a name has 1 to 32 characters")
    desk.run("INSERT INTO items VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", name, value)
    _check_room(desk, "items")
    return _found(desk, name)


@tool(name="drop", writes=True)
def drop_item(desk: Desk, name: str) -> JsonObject:
    """Remove an item."""
    found = _found(desk, name)
    desk.run("DELETE FROM items WHERE name = ?", name)
    return {"dropped": found["name"]}


@tool(name="put", writes=True)
def write_number(desk: Desk, value: int) -> JsonObject:
    """Write a number down."""
    desk.insert("numbers", value=value)
    _check_room(desk, "numbers")
    return {"put": value}


def _found(desk: Desk, name: str) -> JsonObject:
    return desk.found(f"there is no item {name!r}", "list() shows them", "SELECT * FROM items WHERE name = ?", name)


def _check_room(desk: Desk, table: str) -> None:
    if desk.value(f"SELECT count(*) FROM {table}") > MAX_ROWS:
        raise ToolError("full", f"there is room for {MAX_ROWS} {table}")


# Tasks


def _put(value: int) -> Inserted:
    return Inserted("numbers", {"value": value})


def _any_item(rng: random.Random, seed: Seed) -> tuple[str, int]:
    row = rng.choice(seed.rows("SELECT name, value FROM items ORDER BY name"))
    return row["name"], row["value"]


@template(
    "0a",
    params=lambda _rng, _seed: {},
    process=lambda _params: Calls(("list",), only=True),
    size=Size.TINY,
    max_turns=2,
)
def list_all(_params: Params) -> Solution:
    yield Call("list")


@template(
    "0b",
    params=lambda rng, _seed: {"value": rng.randrange(100)},
    expect=lambda params, _seed: [_put(params["value"])],
    size=Size.TINY,
    max_turns=2,
)
def put_number(params: Params) -> Solution:
    yield Call("put", {"value": params["value"]})


VERBS = {
    "put": ("Put {value}.", "Write {value}.", "Note {value}."),
    "drop": ("Drop {name}.", "Remove {name}.", "Delete {name}."),
    "set": ("Set {name} to {value}.", "Make {name} {value}.", "Let {name} be {value}."),
    "list": ("List all.", "Show all.", "List items."),
}


def _verb_params(rng: random.Random, seed: Seed) -> Params | None:
    name, held = _any_item(rng, seed)
    value, verb = rng.randrange(100), rng.choice(sorted(VERBS))
    if verb == "set" and value == held:
        return None  # doing nothing would do
    return {"verb": verb, "name": name, "value": value, "text": rng.choice(VERBS[verb]).format(name=name, value=value)}


def _verb_call(params: Params) -> Call:
    taken = {"put": ("value",), "drop": ("name",), "set": ("name", "value"), "list": ()}[params["verb"]]
    return Call(params["verb"], {argument: params[argument] for argument in taken})


def _verb_expect(params: Params, _seed: Seed) -> list[Expected]:
    key = (params["name"],)
    match params["verb"]:
        case "put":
            return [_put(params["value"])]
        case "drop":
            return [Deleted("items", key)]
        case "set":
            return [Updated("items", key, {"value": params["value"]})]
        case _:
            return []


@template(
    "0c",
    params=_verb_params,
    expect=_verb_expect,
    process=lambda params: Calls((params["verb"],)),
    size=Size.TINY,
    max_turns=2,
)
def by_verb(params: Params) -> Solution:
    yield _verb_call(params)


def _put_and_drop(rng: random.Random, seed: Seed) -> Params:
    return {"name": _any_item(rng, seed)[0], "value": rng.randrange(100)}


@template(
    "0d",
    params=_put_and_drop,
    expect=lambda params, _seed: [_put(params["value"]), Deleted("items", (params["name"],))],
    size=Size.TINY,
    max_turns=4,
)
def put_and_drop(params: Params) -> Solution:
    yield Call("put", {"value": params["value"]})
    yield Call("drop", {"name": params["name"]})


def _value_of(rng: random.Random, seed: Seed) -> Params:
    name, value = _any_item(rng, seed)
    return {"name": name, "wanted": value}


@template("1", params=_value_of, expect=lambda params, _seed: [_put(params["wanted"])], size=Size.TINY, max_turns=4)
def put_value(params: Params) -> Solution:
    told = yield Call("get", {"name": params["name"]})
    yield Call("put", {"value": told["value"]})


def _largest(_rng: random.Random, seed: Seed) -> Params:
    row = seed.rows("SELECT name FROM items ORDER BY value DESC LIMIT 1")[0]  # values of a seed are all different
    return {"wanted": row["name"]}


@template("2", params=_largest, answer=lambda params: Answer(AnswerKind.NAME, params["wanted"]), max_turns=4)
def largest(params: Params) -> Solution:
    told = yield Call("list")
    yield Call("submit_final_answer", {"answer": max(told, key=lambda name: told[name])})


KEYS = App(
    key="keys",
    title="Keys",
    description="Named numbers, and a list to write numbers down.",
    version="v1",
    schema=SCHEMA,
    fill=fill,
    tools=(list_items, get_item, set_item, drop_item, write_number),
    templates=(list_all, put_number, by_verb, put_and_drop, put_value, largest),
)
