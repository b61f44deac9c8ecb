"""Metrics of played groups: by environment, by what tasks are labelled with."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from palestra.environments.text import mean_of_numbers
from palestra.types.rollouts import Group, Rollout, is_usable

Metrics = dict[str, float]
Aggregate = Callable[[str, Sequence[Mapping[str, float | str]]], Metrics]
"""A function of an environment's name and of what it reported for each rollout, together with the `data_source` of its
task."""

SOURCE, LEVEL = "data_source", "level"
"""Fields that tasks may have in their extras, by which metrics are split: where a task is from, how hard it is."""


def mean_by_name(_: str, reported: Sequence[Mapping[str, float | str]]) -> Metrics:
    return mean_of_numbers(reported)


def environment_metrics(groups: Sequence[Group], aggregate: Aggregate = mean_by_name, prefix: str = "env") -> Metrics:
    """Returns each environment's mean reward, and its own metrics, aggregated by its own rule."""
    found: Metrics = {}
    for name in sorted({rollout.environment for group in groups for rollout in group.rollouts}):
        own = [(group, rollout) for group in groups for rollout in group.rollouts if rollout.environment == name]
        area = f"{prefix}/{metric_name(name)}"
        reported = [_reported(group, rollout) for group, rollout in own if rollout.metrics]
        for key, value in sorted(aggregate(name, reported).items()):
            found["/".join([area, *map(metric_name, key.split("/"))])] = value
        if rewards := [reward_of(rollout) for _, rollout in own if is_counted(rollout)]:
            found[f"{area}/reward"] = average(rewards)
        found[f"{area}/rollouts"] = float(len(own))
    return found


def _reported(group: Group, rollout: Rollout) -> dict[str, float | str]:
    source = {SOURCE: found} if (found := _label(group, SOURCE)) else {}
    return {**source, **{name: value for name, value in rollout.metrics.items() if is_usable(value)}}


def label_metrics(groups: Sequence[Group], prefix: str, what: str, value: Callable[[Rollout], float]) -> Metrics:
    """Returns a metric for each `data_source` and `level` that tasks name in their extras: the mean over all would hide
    which of them are learned."""
    found: dict[str, list[float]] = {}
    for group in groups:
        # A set, so that a label that is both source and level counts once.
        for label in {_label(group, SOURCE), _label(group, LEVEL)} - {""}:
            area = f"{prefix}/{metric_name(group.task.environment)}/{metric_name(label)}"
            found.setdefault(f"{area}/{what}", []).extend(value(one) for one in group.rollouts if is_counted(one))
    return {name: average(values) for name, values in sorted(found.items()) if values}


def _label(group: Group, name: str) -> str:
    found = group.task.extras.get(name)
    return found if isinstance(found, str) else ""


def is_counted(rollout: Rollout) -> bool:
    return rollout.is_graded and is_usable(rollout.reward)


def average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def metric_name(name: str) -> str:
    """Replaces characters that trackers do not accept: they know letters, digits and `_.-`; a slash begins a new
    level."""
    return re.sub(r"[^\w.-]", "_", name)


def reward_of(rollout: Rollout) -> float:
    return rollout.reward if rollout.reward is not None else 0.0
