"""Lists of tasks, page by page.

Building a world takes tens of milliseconds, making a task in an existing one takes one or two: so a page uses few
worlds, and the next page others.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

from palestra.environments.platform.app import TaskApp, TaskTemplate
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.task_records import PlatformTask, TaskKey
from palestra.environments.platform.tasks import WORLDS, first_world, make_task

MAX_DIGITS = 9
MAX_TRIES = 16  # numbers of a template in a world that may not have what it needs


def page_of(number: int, size: int) -> range:
    """Returns the worlds of a page: one task of each template in each of them."""
    return range(min(number * size, WORLDS), min((number + 1) * size, WORLDS))


def page_with(data_id: str) -> range:
    """Returns the world of this name, if tasks are played in it."""
    number = data_id.rpartition("-")[2]
    is_there = number.isdecimal() and len(number) <= MAX_DIGITS and int(number) < WORLDS
    return range(int(number), int(number) + 1) if is_there else range(0)


def tasks_in(worlds: Sequence[int], apps: Iterable[TaskApp], first: int) -> Iterator[PlatformTask]:
    """`first` is the lowest number that a task may have."""
    for app in apps:
        for template in app.templates:
            yield from (_task_in(world, app, template, first) for world in worlds)


def _task_in(world: int, app: TaskApp, template: TaskTemplate, first: int) -> PlatformTask:
    """Returns the first task that is possible there. If nearly none is, it is in another world."""
    keys = (TaskKey(app.key, template.name, template.difficulty, number) for number in itertools.count(first))
    drawn_there = (key for key in keys if first_world(key) % WORLDS == world)
    for key in itertools.islice(drawn_there, MAX_TRIES):
        with contextlib.suppress(PlatformError):
            return make_task(key, max_draws=1)
    return make_task(next(drawn_there))
