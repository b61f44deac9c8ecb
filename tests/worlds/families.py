"""Every family of long tasks that ships, and tasks of it by number."""

from __future__ import annotations

import functools
from contextlib import closing

from palestra.environments.platform import APPS, Instance, PlatformTask, TaskKey, make_task, verify
from palestra.environments.platform.attackers import Attacker
from palestra.environments.platform.task_records import FIRST_EVAL

FAMILIES = [(app.key, template.name) for app in APPS.values() for template in app.long_templates]
EVERY_DAY = [("keys", "errands_10"), ("mail", "outages_10"), ("team", "errands_10")]
"""One of a small app, one with failing tools, one of several apps."""


@functools.cache
def task_of(app: str, name: str, number: int) -> PlatformTask:
    template = APPS[app].template(name)
    assert template is not None
    return make_task(TaskKey(app, name, template.difficulty, number))


def tasks_of(app: str, name: str, count: int) -> list[PlatformTask]:
    """Half of them are held out."""
    held_out = count // 2
    numbers = [*range(count - held_out), *range(FIRST_EVAL, FIRST_EVAL + held_out)]
    return [task_of(app, name, number) for number in numbers]


def opened(task: PlatformTask) -> closing[Instance]:
    return closing(Instance(task.seed, variables=task.variables))


def attacked(task: PlatformTask, attacker: Attacker):
    """The verdict on what an attacker leaves."""
    with opened(task) as instance:
        return verify(task, instance, attacker(task, instance))
