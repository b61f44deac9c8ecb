"""Compares two collections of the same tasks: what got better or worse, and whether it is more than chance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from palestra.gym.collect.files import read_lines
from palestra.gym.errors import CollectError
from palestra.gym.metrics.aggregate import by_task, deviation, numbers_of
from palestra.types.gym import TASK_INDEX
from palestra.util.json_types import JsonMapping, JsonObject

CLEAR = 1.96  # standard errors: 95 % of a normal distribution


class TaskChange(Struct, frozen=True):
    task: int
    before: float
    after: float


class Comparison(Struct, frozen=True, kw_only=True):
    field: str
    tasks: int
    """Number of tasks that are in both."""
    only_before: int
    only_after: int
    before: float
    after: float
    difference: float
    """Difference of the means over common tasks, after minus before."""
    standard_error: float
    """Standard error of the difference, paired task by task."""
    is_clear: bool
    """Whether it is further from 0 than chance explains (95 %)."""
    better: list[TaskChange]
    worse: list[TaskChange]
    """The largest changes first."""


def compare(before: Path, after: Path, field: str = "reward") -> Comparison:
    """Compares. Raises CollectError if there are no common tasks."""
    first, second = _means(before, field), _means(after, field)
    common = sorted(first.keys() & second.keys())
    if not common:
        raise CollectError(f"{before} and {after} have no task with {field!r} in common")
    changes = [TaskChange(task, first[task], second[task]) for task in common]
    differences = [one.after - one.before for one in changes]
    mean = math.fsum(differences) / len(differences)
    error = deviation(differences, mean) / math.sqrt(len(differences))
    ranked = sorted(changes, key=lambda one: one.after - one.before)
    return Comparison(
        field=field,
        tasks=len(common),
        only_before=len(first) - len(common),
        only_after=len(second) - len(common),
        before=_mean(first, common),
        after=_mean(second, common),
        difference=mean,
        standard_error=error,
        is_clear=len(common) > 1 and abs(mean) > CLEAR * error,
        better=[one for one in reversed(ranked) if one.after > one.before],
        worse=[one for one in ranked if one.after < one.before],
    )


def _means(path: Path, field: str) -> dict[int, float]:
    """Returns the mean of each task's rollouts."""
    if not path.exists():
        raise CollectError(f"there is no file {path}")
    values: dict[int, list[float]] = {}
    for task, rollouts in by_task([_light(one, field) for one in read_lines(path)]).items():
        found = [one[field] for one in rollouts if field in one]
        if found:
            values[task] = found
    return {task: math.fsum(found) / len(found) for task, found in values.items()}


def _light(result: JsonMapping, field: str) -> JsonObject:
    numbers = numbers_of(result)
    kept = {TASK_INDEX: result.get(TASK_INDEX, 0)}
    return kept | {field: numbers[field]} if field in numbers else kept


def _mean(values: Mapping[int, float], tasks: list[int]) -> float:
    return math.fsum(values[task] for task in tasks) / len(tasks)
