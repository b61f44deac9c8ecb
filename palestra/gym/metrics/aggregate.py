"""The answer to `/aggregate_metrics`: statistics per task and over all rollouts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Required

from typing_extensions import TypedDict  # `extra_items` comes with Python 3.15

from palestra.types.gym import MASK_SAMPLE, ROLLOUT_INDEX, TASK_INDEX, ComputeMetrics, PickKeyMetrics
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload

_KEYS = (TASK_INDEX, ROLLOUT_INDEX, MASK_SAMPLE)

Columns = dict[str, list[float]]


def numbers_of(result: JsonMapping) -> dict[str, float]:
    """Returns every finite number or boolean among a result's own fields and its response's usage."""
    response = result.get("response")
    usage = response.get("usage") if isinstance(response, Mapping) else None
    found = {name: _number(value) for name, value in result.items() if name not in _KEYS}
    if isinstance(usage, Mapping):
        found |= {name: _number(value) for name, value in usage.items()}
    return {name: value for name, value in found.items() if value is not None}


def columns(rows: Iterable[Mapping[str, float]]) -> Columns:
    """Returns the same numbers by name, in the order in which names first appear."""
    made: Columns = {}
    for row in rows:
        for name, value in row.items():
            if name in made:
                made[name].append(value)
            else:
                made[name] = [value]
    return made


def described(made: Columns) -> dict[str, float]:
    """Returns `mean/reward`, `max/reward`, … The deviation of a single value is 0."""
    figures: dict[str, float] = {}
    for name, values in made.items():
        mean = math.fsum(values) / len(values)
        figures[f"mean/{name}"] = mean
        figures[f"max/{name}"] = max(values)
        figures[f"min/{name}"] = min(values)
        figures[f"median/{name}"] = median(values)
        figures[f"std/{name}"] = deviation(values, mean)
    return figures


def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def deviation(values: list[float], mean: float | None = None) -> float:
    """Returns the standard deviation of a sample (n - 1); 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values) if mean is None else mean
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float) and math.isfinite(value):
        return value
    return None


Rollout = JsonMapping


class TaskMetrics(TypedDict, total=False, extra_items=Any):
    """Metrics of a task: its index, statistics by name, and what these say of its rollouts."""

    sample: JsonPayload
    """The row that was played."""
    num_rollouts: Required[int]
    expected_num_rollouts: int
    missing_num_rollouts: int
    reward_profile_completion_pct: float
    rollout_infos: list[JsonPayload]


class RolloutMetrics(TypedDict):
    """The answer."""

    group_level_metrics: list[TaskMetrics]
    agent_metrics: JsonPayload
    key_metrics: JsonPayload


def aggregate(
    verify_responses: Sequence[Rollout],
    compute: ComputeMetrics | None = None,
    pick: PickKeyMetrics | None = None,
) -> RolloutMetrics:
    """Computes metrics. `compute` gets all rollouts task by task and may return `per_task_metrics` (a list with task
    indices) in addition to its own; `pick` chooses the key metrics from all of them."""
    if not verify_responses:
        return {"group_level_metrics": [], "agent_metrics": {}, "key_metrics": {}}
    tasks = by_task(verify_responses)
    numbers = {id(one): numbers_of(one) for one in verify_responses}
    groups = [_group(index, rollouts, numbers) for index, rollouts in tasks.items()]
    overall: JsonObject = dict(described(columns(numbers.values())))
    if compute is not None:
        own = dict(compute(list(tasks.values())))
        _add_per_task(groups, own.pop("per_task_metrics", None))
        overall |= own
    key_metrics = pick(overall) if pick is not None else means(overall)
    return {"group_level_metrics": groups, "agent_metrics": overall, "key_metrics": key_metrics}


def by_task(rollouts: Sequence[Rollout]) -> dict[int, list[Rollout]]:
    """Returns rollouts by task index, each task's in the order of their rollout index."""
    tasks: dict[int, list[Rollout]] = {}
    for one in rollouts:
        tasks.setdefault(one.get(TASK_INDEX, 0), []).append(one)
    for members in tasks.values():
        members.sort(key=lambda one: one.get(ROLLOUT_INDEX, 0))
    return dict(sorted(tasks.items()))


def means(metrics: JsonPayload) -> JsonPayload:
    """Returns the key metrics if none are chosen."""
    return {name: value for name, value in metrics.items() if name.startswith("mean/")}


def with_expected(
    groups: list[TaskMetrics], expected: Counter[int], samples: Mapping[int, Rollout]
) -> list[TaskMetrics]:
    """Adds how many of each task's rollouts there are, and the row they were played from."""
    for group in groups:
        index = group[TASK_INDEX]
        expected_count, found = expected.get(index, group["num_rollouts"]), group["num_rollouts"]
        row = samples.get(index, {})
        group["sample"] = {name: value for name, value in row.items() if name not in (TASK_INDEX, ROLLOUT_INDEX)}
        group["expected_num_rollouts"] = expected_count
        group["missing_num_rollouts"] = expected_count - found
        group["reward_profile_completion_pct"] = 100.0 * found / expected_count if expected_count else 100.0
    return groups


def _group(index: int, rollouts: list[Rollout], numbers: dict[int, dict[str, float]]) -> TaskMetrics:
    found = len(rollouts)
    group: Any = {
        TASK_INDEX: index,
        **described(columns(numbers[id(one)] for one in rollouts)),
        "sample": {},
        "num_rollouts": found,
        "expected_num_rollouts": found,
        "missing_num_rollouts": 0,
        "reward_profile_completion_pct": 100.0,
        "rollout_infos": [_info(index, one, numbers[id(one)]) for one in rollouts],
    }
    return group


def _info(index: int, rollout: Rollout, numbers: dict[str, float]) -> JsonPayload:
    number = rollout.get(ROLLOUT_INDEX, 0)
    return {"rollout_id": f"{index}:{number}", TASK_INDEX: index, ROLLOUT_INDEX: number, **numbers}


def _add_per_task(groups: list[TaskMetrics], own: Any) -> None:
    """Adds a server's own metrics of a task to the common ones."""
    if not own:
        return
    of_task = {one[TASK_INDEX]: one for one in own}
    for group in groups:
        group |= {name: value for name, value in of_task.get(group[TASK_INDEX], {}).items() if name != TASK_INDEX}
