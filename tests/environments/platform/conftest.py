"""Every task of every template that ships, by number."""

from __future__ import annotations

import functools
import itertools

from palestra.environments.platform import (
    APPS,
    Instance,
    PlatformTask,
    TaskKey,
    TaskTemplate,
    make_task,
)
from palestra.environments.platform.golden import GoldTrajectory, play_golden
from palestra.environments.platform.tasks import WORLDS, first_world

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
    return tuple(map(make_task, itertools.islice((key for key in keys if first_world(key) % WORLDS == 0), count)))


def opened(task: PlatformTask) -> Instance:
    return Instance(task.seed, variables=task.variables)


def golden(task: PlatformTask, instance: Instance) -> GoldTrajectory:
    return play_golden(task, instance)
