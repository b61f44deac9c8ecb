"""Every task of every template that ships, by number, and what plays it wrongly."""

from __future__ import annotations

import random
from collections.abc import Callable

from palestra.environments.platform import APPS, Instance, PlatformTask, TaskTemplate, make_task
from palestra.environments.platform.golden import Golden, play_golden

TEMPLATES = [(app.key, template) for app in APPS.values() for template in app.templates]
NAMES = [f"{app}-{template.name}" for app, template in TEMPLATES]


def tasks_of(app: str, template: TaskTemplate, count: int, first: int = 0) -> list[PlatformTask]:
    numbers = range(first, first + count)
    return [make_task(f"{app}-{template.name}-{template.difficulty}-{number}") for number in numbers]


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
    rng = random.Random(str(task.key))
    for _ in range(12):
        tool = rng.choice(task.app.tools)
        instance.call(tool.name, {name: _drawn(rng, schema) for name, schema in tool.parameters["properties"].items()})


def stray_write(task: PlatformTask, instance: Instance, seed: int) -> None:
    rng = random.Random(seed)
    tool = rng.choice([tool for tool in task.app.tools if tool.writes])
    instance.call(tool.name, {name: _drawn(rng, schema) for name, schema in tool.parameters["properties"].items()})


def _drawn(rng: random.Random, schema: dict[str, object]) -> object:
    choices = schema.get("enum")
    if isinstance(choices, list):
        return rng.choice(choices)
    kinds = {"integer": rng.randrange(200), "boolean": rng.random() < 0.5, "array": [], "number": rng.random()}
    return kinds.get(str(schema.get("type")), rng.choice(("a", "b", "inbox", "2026-03-04")))


def golden(task: PlatformTask, instance: Instance) -> Golden:
    return play_golden(task, instance)
