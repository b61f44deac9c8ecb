"""The numbers of a rollout, and five figures about a column of them.

Owns: which fields count as numbers, mean, extremes, median, deviation. Never touches: tasks, files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from palestra.gym.records import MASK_SAMPLE, ROLLOUT_INDEX, TASK_INDEX
from palestra.util.json_types import JsonMapping

_KEYS = (TASK_INDEX, ROLLOUT_INDEX, MASK_SAMPLE)

Columns = dict[str, list[float]]


def numbers_of(result: JsonMapping) -> dict[str, float]:
    """Every number or truth value among a result's own fields and its response's usage; what is not finite is none."""
    response = result.get("response")
    usage = response.get("usage") if isinstance(response, Mapping) else None
    found = {name: _number(value) for name, value in result.items() if name not in _KEYS}
    if isinstance(usage, Mapping):
        found |= {name: _number(value) for name, value in usage.items()}
    return {name: value for name, value in found.items() if value is not None}


def columns(rows: Iterable[Mapping[str, float]]) -> Columns:
    """The same numbers, name by name, in the order names first appear."""
    made: Columns = {}
    for row in rows:
        for name, value in row.items():
            if name in made:
                made[name].append(value)
            else:
                made[name] = [value]
    return made


def described(made: Columns) -> dict[str, float]:
    """`mean/reward`, `max/reward`, … A single value deviates by 0."""
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
    """Of a sample (n - 1); 0 for fewer than two values."""
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
