"""The answer to `/aggregate_metrics`: figures per task and over all rollouts.

Owns: grouping by task, the shape of the answer, where a server's own metrics go in. Never touches: HTTP, files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palestra.gym.metrics.numbers import columns, described, numbers_of
from palestra.gym.records import ROLLOUT_INDEX, TASK_INDEX
from palestra.util.json_types import JsonMapping, JsonObject

Rollout = JsonMapping
ComputeMetrics = Callable[[list[list[Rollout]]], JsonObject]
PickKeyMetrics = Callable[[JsonObject], JsonObject]


def aggregate(
    verify_responses: Sequence[Rollout],
    compute: ComputeMetrics | None = None,
    pick: PickKeyMetrics | None = None,
) -> JsonObject:
    """`{group_level_metrics, agent_metrics, key_metrics}`. `compute` gets all rollouts task by task and may say
    `per_task_metrics` (a list with task indices) beside its own; `pick` chooses the headline from all of them."""
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
    """By task index, each task's in the order of their rollout index."""
    tasks: dict[int, list[Rollout]] = {}
    for one in rollouts:
        tasks.setdefault(one.get(TASK_INDEX, 0), []).append(one)
    for members in tasks.values():
        members.sort(key=lambda one: one.get(ROLLOUT_INDEX, 0))
    return dict(sorted(tasks.items()))


def means(metrics: JsonMapping) -> JsonObject:
    """The headline where nobody chose one."""
    return {name: value for name, value in metrics.items() if name.startswith("mean/")}


def with_expected(groups: list[JsonObject], expected: Counter[int], samples: Mapping[int, Rollout]) -> list[JsonObject]:
    """How much of each task's rollouts there is, and the row they were played from."""
    for group in groups:
        index = group[TASK_INDEX]
        wanted, found = expected.get(index, group["num_rollouts"]), group["num_rollouts"]
        row = samples.get(index, {})
        group["sample"] = {name: value for name, value in row.items() if name not in (TASK_INDEX, ROLLOUT_INDEX)}
        group["expected_num_rollouts"] = wanted
        group["missing_num_rollouts"] = wanted - found
        group["reward_profile_completion_pct"] = 100.0 * found / wanted if wanted else 100.0
    return groups


def _group(index: int, rollouts: list[Rollout], numbers: dict[int, dict[str, float]]) -> JsonObject:
    found = len(rollouts)
    return {
        TASK_INDEX: index,
        **described(columns(numbers[id(one)] for one in rollouts)),
        "sample": {},
        "num_rollouts": found,
        "expected_num_rollouts": found,
        "missing_num_rollouts": 0,
        "reward_profile_completion_pct": 100.0,
        "rollout_infos": [_info(index, one, numbers[id(one)]) for one in rollouts],
    }


def _info(index: int, rollout: Rollout, numbers: dict[str, float]) -> JsonObject:
    number = rollout.get(ROLLOUT_INDEX, 0)
    return {"rollout_id": f"{index}:{number}", TASK_INDEX: index, ROLLOUT_INDEX: number, **numbers}


def _add_per_task(groups: list[JsonObject], own: Any) -> None:
    """A server's own figures of a task go beside the common ones."""
    if not own:
        return
    of_task = {one[TASK_INDEX]: one for one in own}
    for group in groups:
        group |= {name: value for name, value in of_task.get(group[TASK_INDEX], {}).items() if name != TASK_INDEX}
