"""Scores of an evaluation for each environment: pass@k with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from palestra.rollouts.eval_metrics import pass_at_k
from palestra.rollouts.group_metrics import Metrics, average, is_counted, metric_name
from palestra.types.rollouts import Group

Z = 1.959964  # two-sided 95%


class ScoreInterval(NamedTuple):
    low: float
    high: float


def wilson_interval(share: float, count: int) -> ScoreInterval:
    """Returns the 95% score interval of a share of `count` independent tasks. For shares that are means of several
    samples of each task it is at most too wide, since a mean varies less than a single sample."""
    middle = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z / (1 + Z * Z / count) * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return ScoreInterval(min(low, share), max(high, share))  # rounding, where the share is nearly 0 or 1


def score_metrics(groups: Sequence[Group], ks: Sequence[int], success: float, prefix: str = "eval") -> Metrics:
    """Returns pass@k of each environment with the ends of its interval, and the number of its tasks. A task with fewer
    than k graded samples is left out of pass@k."""
    found: Metrics = {}
    for name in sorted({group.task.environment for group in groups}):
        area = f"{prefix}/{metric_name(name)}"
        own = [[one for one in group.rollouts if is_counted(one)] for group in groups if group.task.environment == name]
        counts = [(sum((one.reward or 0.0) >= success for one in graded), len(graded)) for graded in own]
        found[f"{area}/tasks"] = float(len(own))
        for k in ks:
            if chances := [pass_at_k(successes, samples, k) for successes, samples in counts if samples >= k]:
                share = average(chances)
                low, high = wilson_interval(share, len(chances))
                found |= {
                    f"{area}/pass_at_{k}": share,
                    f"{area}/pass_at_{k}_low": low,
                    f"{area}/pass_at_{k}_high": high,
                }
    return found
