"""Computes the advantage of each rollout from the rewards of its group, or of the step, less its penalties.

With r a rollout's reward, m and s mean and standard deviation of its group's rewards, M and S those of the step's:

grpo           (r - m) / s                       reinforce++    (r - M) / S
mean_baseline  r - m, as dr_grpo                 batch_std      (r - m) / S
leave_one_out  r - mean of the others            maxrl          (r - m) / m, 0 if m is not positive
gdpo           x = sum of weight (p - m_p) / s_p over the parts p of the reward; (x - M_x) / S_x
pass_at_k      k times the mean, over all sets of k - 1 of the other n - 1, of max(0, r - the best of the set)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from palestra.config.algorithm import AdvantageKind, PenaltyConfig
from palestra.types.rollouts import LARGEST_REWARD, Branch, Rollout, is_usable

EQUAL_STD = 1e-8  # rewards closer than this are equal: the difference is a rounding error
STD_FLOOR = 1e-6  # added to the divisor, as in the GRPO implementations people compare with

RewardParts = Mapping[str, Sequence[float]]
"""What each part of the reward is, for the rollouts of a group."""


def step_advantages(groups: Sequence[Sequence[float]], kind: AdvantageKind, pass_k: int = 1) -> list[list[float]]:
    """Returns the advantage for each reward of each group, in the same order.

    Pass the rewards of graded rollouts only: one that failed says nothing about the policy and would shift the baseline
    of the rest.
    """
    if kind is AdvantageKind.REINFORCE_PP:
        return _normalised(groups)
    if kind is AdvantageKind.BATCH_STD:
        _, std = mean_and_std([reward for rewards in groups for reward in rewards])
        centred_G = [group_advantages(rewards, AdvantageKind.MEAN_BASELINE) for rewards in groups]
        return [[one / (std + STD_FLOOR) for one in centred] for centred in centred_G]
    return [group_advantages(rewards, kind, pass_k) for rewards in groups]


def decoupled_advantages(groups: Sequence[RewardParts], weights: Mapping[str, float]) -> list[list[float]]:
    """Returns GDPO's: no part is drowned by another whose rewards differ more."""
    sums_G = []
    for parts in groups:
        advantages_P = {name: group_advantages(values, AdvantageKind.GRPO) for name, values in parts.items()}
        weighted = ([weights[name] * one for one in advantages] for name, advantages in advantages_P.items())
        sums_G.append([math.fsum(of_rollout) for of_rollout in zip(*weighted, strict=True)])
    return _normalised(sums_G)


def _normalised(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    mean, std = mean_and_std([value for values in groups for value in values])
    if std < EQUAL_STD:
        return [[0.0] * len(values) for values in groups]
    return [[(value - mean) / (std + STD_FLOOR) for value in values] for values in groups]


def group_advantages(rewards: Sequence[float], kind: AdvantageKind, pass_k: int = 1) -> list[float]:
    """Returns the advantages of a group by itself; all are 0 if the rewards do not differ."""
    mean, std = mean_and_std(rewards)
    if std < EQUAL_STD:
        return [0.0] * len(rewards)
    centred = [reward - mean for reward in rewards]
    match kind:
        case AdvantageKind.GRPO:
            return [one / (std + STD_FLOOR) for one in centred]
        case AdvantageKind.LEAVE_ONE_OUT:
            return _against_the_others(centred)
        case AdvantageKind.MEAN_BASELINE | AdvantageKind.DR_GRPO:
            return centred
        case AdvantageKind.MAXRL:
            return [one / (mean + STD_FLOOR) if mean > 0 else 0.0 for one in centred]
        case AdvantageKind.PASS_AT_K:
            return _against_the_others(centred) if pass_k == 1 else _gains_of_the_best(rewards, pass_k)
        case AdvantageKind.BATCH_STD | AdvantageKind.REINFORCE_PP | AdvantageKind.GDPO:
            raise ValueError(f"{kind} compares the groups of a step, not one by itself")


def _against_the_others(centred: Sequence[float]) -> list[float]:
    """r - (total - r) / (n - 1) is the same as (r - mean) * n / (n - 1)."""
    return [one * len(centred) / (len(centred) - 1) for one in centred]


def _gains_of_the_best(rewards: Sequence[float], k: int) -> list[float]:
    """Returns by how much each rollout raises the best of k (Walder and Karkhanis 2025). Of the others in ascending
    order, number j is the best of C(j, k - 2) sets of k - 1, and k / C(n - 1, k - 1) is n / C(n, k)."""
    n = len(rewards)
    k = min(k, n)
    sets_J = [math.comb(j, k - 2) * n / math.comb(n, k) for j in range(n - 1)]
    ordered = sorted(rewards)
    gains = {}
    for reward in set(rewards):
        others = ordered.copy()
        others.remove(reward)
        gains[reward] = math.fsum(sets * max(0.0, reward - best) for sets, best in zip(sets_J, others, strict=True))
    return [gains[reward] for reward in rewards]


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


def shaped_reward(rollout: Rollout, penalty: PenaltyConfig, max_context: int, pass_rate: float = 1.0) -> float:
    """Returns the reward that advantages are computed from. The rollout must be graded. `pass_rate` is its group's, by
    which the price of length and turns is multiplied with `by_pass_rate`."""
    if rollout.reward is None:
        raise ValueError(f"rollout {rollout.id} has no reward to shape")
    reward, share = rollout.reward, pass_rate if penalty.by_pass_rate else 1.0
    if penalty.length:
        reward -= share * penalty.length * overlength(rollout, penalty.length_window, max_context)
    if penalty.turn:
        reward -= share * penalty.turn * max(0, rollout.fork_turn + len(rollout.all_turns) - 1)
    if penalty.format and rollout.metrics.get("parse_error", 0.0) > 0:
        reward -= penalty.format
    if penalty.cut and rollout.is_cut:
        reward -= penalty.cut
    return reward


def overlength(rollout: Rollout, window: int, max_context: int) -> float:
    """Returns 0 up to `window` tokens before the limit, then a value that rises linearly to 1 (DAPO's soft overlong
    punishment)."""
    return min(1.0, max(0.0, (total_length(rollout) - (max_context - window)) / window))


def total_length(rollout: Rollout | Branch) -> int:
    """Returns the number of tokens of prompt, observations and samples."""
    return len(rollout.prompt) + sum(len(turn.observation) + len(turn.tokens) for turn in rollout.turns)
