"""Splits the tasks of a file into those to train on and those for evaluation, by each task's own hash, so that adding
tasks to a file does not move the rest.

The rules are those by which Fleet's datasets are built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from palestra.environments.fleet.platform_tasks import Split
from palestra.environments.fleet.records import FleetTask
from palestra.types.rollouts import Task

EVAL_SHARE, MAX_EVAL, MIN_EVAL = 0.20, 20, 5  # of one app
MAX_EVAL_TOTAL, EVAL_EACH = 60, 4  # of all apps, and of each app before any has more
TRAIN_SHARE = 0.20  # of all tasks that one app may have, if there are enough apps for that


def split_tasks(tasks: Iterable[FleetTask], split: Split) -> list[FleetTask]:
    by_app: dict[str, list[FleetTask]] = {}
    for task in tasks:
        by_app.setdefault(task.env_key, []).append(task)
    if split == "eval":
        return _spread([_kept_back(own) for own in by_app.values()])
    total = sum(map(len, by_app.values()))
    cap = int(total * TRAIN_SHARE) if len(by_app) * TRAIN_SHARE > 1 else total
    return [task for own in by_app.values() for task in _trained(own, cap)]


def rows_of(tasks: Iterable[FleetTask], tasks_file: str) -> Sequence[Task]:
    """Returns tasks for a training run."""
    return [
        Task(
            id=task.task_key,
            environment="fleet_task",
            prompt=[{"role": "user", "content": task.prompt}],
            extras={"task_key": task.task_key, "data_source": task.env_key, "tasks_file": tasks_file},
        )
        for task in tasks
    ]


def place_of(task: FleetTask) -> float:
    """Returns a number from 0 to 1, derived from the key alone."""
    digest = hashlib.md5(task.task_key.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _kept_back(own: Sequence[FleetTask]) -> list[FleetTask]:
    size = min(int(len(own) * EVAL_SHARE), MAX_EVAL)
    if size < MIN_EVAL:
        return []
    return sorted((task for task in own if place_of(task) < size / len(own)), key=place_of)


def _trained(own: Sequence[FleetTask], cap: int) -> list[FleetTask]:
    kept_back = {task.task_key for task in _kept_back(own)}
    rest = [task for task in own if task.task_key not in kept_back]
    chosen = {task.task_key for task in sorted(rest, key=place_of)[:cap]}
    return [task for task in rest if task.task_key in chosen]


def _spread(apps: Sequence[Sequence[FleetTask]]) -> list[FleetTask]:
    """Takes some tasks of each app, then more of each in turn."""
    first = [task for own in apps for task in own[:EVAL_EACH]]
    more = [task for tier in zip_longest(*(own[EVAL_EACH:] for own in apps)) for task in tier if task is not None]
    return [*first, *more][:MAX_EVAL_TOTAL]
