"""Computes the advantage of each rollout from the rewards of its group.

Owns: the arithmetic of baselines. Never touches: tokens, penalties, which rollouts are in a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from palestra.config.train import AdvantageKind
from palestra.types.rollouts import LARGEST_REWARD, is_usable

EQUAL_STD = 1e-8  # rewards closer than this are equal: the difference is a rounding error
STD_FLOOR = 1e-6  # added to the divisor, as in the GRPO implementations people compare with


def group_advantages(rewards: Sequence[float], kind: AdvantageKind) -> list[float]:
    """Returns the advantage for each reward, in the same order; all are 0 if the rewards do not differ.

    Pass the rewards of graded rollouts only: one that failed says nothing about the policy and would shift the baseline
    of the rest.
    """
    mean, std = mean_and_std(rewards)
    if std < EQUAL_STD:
        return [0.0] * len(rewards)
    centred = [reward - mean for reward in rewards]
    match kind:
        case AdvantageKind.GRPO:
            return [one / (std + STD_FLOOR) for one in centred]
        case AdvantageKind.LEAVE_ONE_OUT:
            # r - (total - r) / (n - 1) is the same as (r - mean) * n / (n - 1)
            return [one * len(rewards) / (len(rewards) - 1) for one in centred]
        case AdvantageKind.MEAN_BASELINE | AdvantageKind.DR_GRPO:
            return centred


def are_equal(rewards: Sequence[float]) -> bool:
    """Whether nothing can be learned from comparing the rewards. True for no reward and for a single one."""
    return mean_and_std(rewards)[1] < EQUAL_STD


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Returns mean and standard deviation of the population (divided by n); (0, 0) if there are no values."""
    if not values:
        return 0.0, 0.0
    if not all(is_usable(value) for value in values):
        raise ValueError(
            f"rewards must be numbers between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}, got {list(values)}"
        )
    if min(values) == max(values):
        # the quotient below may differ from it by a rounding error, which is large if the rewards are large
        return values[0], 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) * (value - mean) for value in values) / len(values))
