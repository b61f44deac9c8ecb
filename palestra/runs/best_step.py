"""The best of a run's steps by one metric."""

from __future__ import annotations

import math
from collections.abc import Mapping


def best_step(values: Mapping[int, float], metric: str) -> int | None:
    """The step with the best value of the metric, the newest of equal ones; None if no step has a finite one."""
    sign = -1.0 if is_loss(metric) else 1.0
    finite = [step for step, value in values.items() if math.isfinite(value)]
    return max(finite, key=lambda step: (sign * values[step], step), default=None)


def is_loss(metric: str) -> bool:
    """Whether less of it is better."""
    return "loss" in metric.split("/")
