"""From the rewards of a group to the advantage of each rollout.

Owns: the arithmetic of baselines. Never touches: tokens, penalties, who is in a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from palestra.config.train import AdvantageKind

LARGEST_REWARD = 1e30  # squares and sums of such numbers stay finite, and so do the engine's float32 products
EQUAL_STD = 1e-8  # rewards closer than this are equal: what is left is rounding
STD_FLOOR = 1e-6  # added to the divisor, as in the GRPO implementations people compare with


def group_advantages(rewards: Sequence[float], kind: AdvantageKind) -> list[float]:
    """One for each reward, in their order; all 0 where the rewards do not differ.

    Give it the rewards of graded rollouts only: one that failed says nothing about the policy and would shift the
    baseline of the rest.
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
    """Nothing can be learned from comparing them. True of none and of one."""
    return mean_and_std(rewards)[1] < EQUAL_STD


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation of the population: divided by n. (0, 0) for no values."""
    if not values:
        return 0.0, 0.0
    if not all(is_usable(value) for value in values):
        raise ValueError(
            f"rewards must be numbers between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}, got {list(values)}"
        )
    if min(values) == max(values):
        return values[0], 0.0  # the quotient below may miss it by a rounding, which is large where the rewards are
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) * (value - mean) for value in values) / len(values))


def is_usable(reward: float | None) -> bool:
    """A number one can calculate with; NaN and infinities are not."""
    return reward is not None and abs(reward) <= LARGEST_REWARD
