"""Every task of every template that ships, by number, and what plays it wrongly."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from palestra.environments.platform import (
    APPS,
    Instance,
    PlatformError,
    PlatformTask,
    PlatformTool,
    TaskKey,
    TaskTemplate,
    make_task,
)
from palestra.environments.platform.app import SeedDatabase
from palestra.environments.platform.changes import tables_of
from palestra.environments.platform.golden import GoldTrajectory, play_golden
from palestra.environments.platform.tasks import first_world

TEMPLATES = [(app.key, template) for app in APPS.values() for template in app.templates]
NAMES = [f"{app}-{template.name}" for app, template in TEMPLATES]


FEW = 1
"""Tasks of a template for every day: building their worlds takes most of the time of these tests, so they are of one
world."""


def tasks_of(app: str, template: TaskTemplate, count: int = FEW, first: int = 0) -> list[PlatformTask]:
    if count <= FEW:
        return tasks_of_one_world(app, template, count, first)
    return [make_task(TaskKey(app, template.name, template.difficulty, n)) for n in range(first, first + count)]


def tasks_of_one_world(app: str, template: TaskTemplate, count: int, first: int = 0) -> list[PlatformTask]:
    """Tasks that are drawn in the app's world 0, which is built once."""
    return list(_made_once(app, template.name, template.difficulty, count, first))


@functools.cache
def _made_once(app: str, name: str, difficulty: str, count: int, first: int) -> tuple[PlatformTask, ...]:
    keys = (TaskKey(app, name, difficulty, number) for number in itertools.count(first))
    return tuple(map(make_task, itertools.islice((key for key in keys if first_world(key) == 0), count)))


def opened(task: PlatformTask) -> Instance:
    return Instance(task.seed)


# Attackers: each plays a task in a way that must come to nothing. Returns the answer it gives.

Attacker = Callable[[PlatformTask, Instance], str | None]


def nothing(_task: PlatformTask, _instance: Instance) -> None:
    return None


def answer_only(task: PlatformTask, _instance: Instance) -> str:
    """The right words, and nothing done."""
    return "done" if task.template.answer is None else "0"


def random_calls(task: PlatformTask, instance: Instance) -> None:
    """So many that the one which is wanted, hit on by luck, is not the only one that did something."""
    rng = random.Random(str(task.key))
    for _ in range(60):
        random_call(rng, task, instance, task.app.tools)


def stray_write(task: PlatformTask, instance: Instance) -> None:
    """What another task of the same world asks for, once something has come of it."""
    before, rng = instance.changes(), random.Random(str(task.key))
    while instance.changes() == before:
        template = rng.choice(task.app.templates)
        params = template.params(rng, task.seed)
        if params is not None:
            with contextlib.suppress(
                PlatformError, LookupError, ValueError, RuntimeError
            ):  # need not work in a changed world
                play_golden(replace(task, template=template, params=params), instance)


def random_call(rng: random.Random, task: PlatformTask, instance: Instance, tools: Sequence[PlatformTool]) -> None:
    """Of what the schema allows, with words that occur in this world."""
    tool, words = rng.choice(tools), words_of(task.seed.digest, task.seed)
    expected = tool.parameters["required"]
    taken = [name for name in tool.parameters["properties"] if name in expected or rng.random() < 0.3]
    instance.call(tool.name, {name: drawn(rng, tool.parameters["properties"][name], words) for name in taken})


_words: dict[str, list[str]] = {}


def words_of(digest: str, seed: SeedDatabase) -> list[str]:
    if digest not in _words:
        tables = [table.name for table in tables_of(seed.connection)]
        values = {value for name in tables for row in seed.rows(f"SELECT * FROM {name}") for value in row.values()}
        _words[digest] = sorted(value for value in values if isinstance(value, str) and 0 < len(value) <= 40)
    return _words[digest]


def drawn(rng: random.Random, schema: dict[str, Any], words: list[str]) -> object:
    match schema:
        case {"enum": choices}:
            return rng.choice(choices)
        case {"type": "integer"}:
            return round(10 ** rng.uniform(0, 4))  # of small ones as many as of large ones
        case {"type": "boolean"}:
            return rng.random() < 0.5
        case {"type": "array", "items": items}:
            return [drawn(rng, items, words) for _ in range(rng.randint(0, 2))]
        case _:
            return rng.choice(words)


def golden(task: PlatformTask, instance: Instance) -> GoldTrajectory:
    return play_golden(task, instance)
