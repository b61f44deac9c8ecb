"""The answer to `/aggregate_metrics`: figures per task and over all rollouts, and a server's own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nemo_gym.config_types import AggregateMetrics
from nemo_gym.global_config import ROLLOUT_INDEX_KEY_NAME, TASK_INDEX_KEY_NAME
from nemo_gym.json_types import JsonMapping, JsonObject
from nemo_gym.pass_rates import (
    add_avg_sample_std_dev,
    compute_pass_majority_metrics,
    compute_subset_metrics,
    highest_k_metrics,
)

__all__ = [
    "AggregateMetricsMixin",
    "add_avg_sample_std_dev",
    "compute_aggregate_metrics",
    "compute_pass_majority_metrics",
    "compute_subset_metrics",
    "highest_k_metrics",
]

_KEYS = (TASK_INDEX_KEY_NAME, ROLLOUT_INDEX_KEY_NAME, "mask_sample")
Rollout = JsonObject


class AggregateMetricsMixin:
    def compute_metrics(self, tasks: list[list[Rollout]]) -> JsonObject:
        """A server's own metrics, from all rollouts of each task; `per_task_metrics` may be among them."""
        return {}

    def get_key_metrics(self, agent_metrics: JsonObject) -> JsonObject:
        """The headline: all means, where a server does not choose."""
        return means(agent_metrics)


def means(metrics: JsonMapping) -> JsonObject:
    return {name: value for name, value in metrics.items() if name.startswith("mean/")}


def compute_aggregate_metrics(
    verify_responses: list[Rollout],
    compute_metrics_fn: Callable[[list[list[Rollout]]], JsonObject] | None = None,
    get_key_metrics_fn: Callable[[JsonObject], JsonObject] | None = None,
) -> AggregateMetrics:
    if not verify_responses:
        return AggregateMetrics()
    tasks: dict[Any, list[Rollout]] = {}
    for one in verify_responses:
        tasks.setdefault(one.get(TASK_INDEX_KEY_NAME, 0), []).append(one)
    tasks = {index: sorted(tasks[index], key=lambda one: one.get(ROLLOUT_INDEX_KEY_NAME, 0)) for index in sorted(tasks)}
    groups = [_group(index, rollouts) for index, rollouts in tasks.items()]
    overall: JsonObject = _described(map(_numbers, verify_responses))
    if compute_metrics_fn is not None:
        own = dict(compute_metrics_fn(list(tasks.values())))
        per_task = {one[TASK_INDEX_KEY_NAME]: one for one in own.pop("per_task_metrics", None) or ()}
        groups = [{**group, **per_task.get(group[TASK_INDEX_KEY_NAME], {})} for group in groups]
        overall |= own
    pick = get_key_metrics_fn or means
    return AggregateMetrics(group_level_metrics=groups, agent_metrics=overall, key_metrics=pick(overall))


def _group(index: object, rollouts: list[Rollout]) -> JsonObject:
    numbers = [_numbers(one) for one in rollouts]
    return {
        **_described(numbers),
        TASK_INDEX_KEY_NAME: index,
        "sample": {},
        "num_rollouts": len(rollouts),
        "expected_num_rollouts": len(rollouts),
        "missing_num_rollouts": 0,
        "reward_profile_completion_pct": 100.0,
        "rollout_infos": [_info(index, one, found) for one, found in zip(rollouts, numbers, strict=True)],
    }


def _info(index: object, rollout: Rollout, numbers: dict[str, float]) -> JsonObject:
    number = rollout.get(ROLLOUT_INDEX_KEY_NAME, 0)
    return {"rollout_id": f"{index}:{number}", TASK_INDEX_KEY_NAME: index, ROLLOUT_INDEX_KEY_NAME: number, **numbers}


def _numbers(rollout: Rollout) -> dict[str, float]:
    """Every finite number or truth value among its fields and its response's usage."""
    response = rollout.get("response")
    usage = response.get("usage") if isinstance(response, Mapping) else None
    fields = {**rollout, **(usage if isinstance(usage, Mapping) else {})}
    return {
        name: int(value) if isinstance(value, bool) else value
        for name, value in fields.items()
        if isinstance(value, int | float) and math.isfinite(value) and name not in _KEYS
    }


def _described(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    figures: dict[str, float] = {}
    for name, values in columns.items():
        figures[f"mean/{name}"] = statistics.fmean(values)
        figures[f"max/{name}"] = max(values)
        figures[f"min/{name}"] = min(values)
        figures[f"median/{name}"] = statistics.median(values)
        figures[f"std/{name}"] = statistics.stdev(map(float, values)) if len(values) > 1 else 0.0
    return figures
