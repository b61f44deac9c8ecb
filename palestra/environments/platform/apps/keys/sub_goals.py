"""Requests of `keys` that occur in long tasks only."""

from __future__ import annotations

import random

from palestra.environments.platform.app import SeedDatabase, TemplateMaker
from palestra.environments.platform.expectations import Expected, InsertedRow, UpdatedRow
from palestra.environments.platform.task_templates import Params, Solution, SolutionCall

template = TemplateMaker("palestra.environments.platform.apps.keys")

NEW_NAMES = tuple("ijklmnopqrstuvwxyz")
VALUES = 100


def _items(seed: SeedDatabase) -> list[tuple[str, int]]:
    return [(row["name"], row["value"]) for row in seed.rows("SELECT name, value FROM items ORDER BY name")]


def _new(rng: random.Random, _seed: SeedDatabase) -> Params:
    return {"name": rng.choice(NEW_NAMES) + rng.choice(("", *NEW_NAMES)), "value": rng.randrange(VALUES)}


def _made(params: Params, _seed: SeedDatabase) -> list[Expected]:
    return [InsertedRow("items", {"name": params["name"], "value": params["value"]})]


@template("0", params=_new, expect=_made)
def new_item(params: Params) -> Solution:
    yield SolutionCall("set", {"name": params["name"], "value": params["value"]})


def _copied(rng: random.Random, seed: SeedDatabase) -> Params:
    source, value = rng.choice(_items(seed))
    return {**_new(rng, seed), "source": source, "value": value}


@template("1", params=_copied, expect=_made)
def copy_item(params: Params) -> Solution:
    found = yield SolutionCall("get", {"name": params["source"]})
    yield SolutionCall("set", {"name": params["name"], "value": found["value"]})


def _sum(rng: random.Random, seed: SeedDatabase) -> Params:
    (first, a), (second, b) = rng.sample(_items(seed), 2)
    return {"first": first, "second": second, "value": a + b}


@template("2", params=_sum, expect=lambda params, _seed: [InsertedRow("numbers", {"value": params["value"]})])
def put_sum(params: Params) -> Solution:
    first = yield SolutionCall("get", {"name": params["first"]})
    second = yield SolutionCall("get", {"name": params["second"]})
    yield SolutionCall("put", {"value": first["value"] + second["value"]})


def _doubled(rng: random.Random, seed: SeedDatabase) -> Params | None:
    name, value = rng.choice(_items(seed))
    return {"name": name, "value": 2 * value} if value else None


@template(
    "1",
    params=_doubled,
    expect=lambda params, _seed: [UpdatedRow("items", (params["name"],), {"value": params["value"]})],
)
def double_item(params: Params) -> Solution:
    found = yield SolutionCall("get", {"name": params["name"]})
    yield SolutionCall("set", {"name": params["name"], "value": 2 * found["value"]})


SUB_GOALS = (new_item, copy_item, put_sum, double_item)
