"""Metrics of how good a policy is on tasks that it does not train on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from palestra.rollouts.group_metrics import (
    Aggregate,
    Metrics,
    average,
    environment_metrics,
    is_counted,
    label_metrics,
    mean_by_name,
    metric_name,
)
from palestra.types.rollouts import Group, Rollout


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """Returns the probability that k of the samples, drawn without replacement, include a success: an unbiased estimate
    for any k <= samples."""
    if not 0 <= successes <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {successes} successes in {samples} samples: k must be from 1 to the samples")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def eval_metrics(
    groups: Sequence[Group],
    ks: Sequence[int],
    success: float,
    aggregate: Aggregate = mean_by_name,
    prefix: str = "eval",
) -> Metrics:
    """Returns the metrics of an evaluation. A rollout succeeds with a reward of `success` or more. A rollout that could
    not be graded counts neither as success nor as failure, only in `failed_share`; a task with fewer than k graded
    samples is left out of pass@k."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    graded_G = [[one for one in group.rollouts if is_counted(one)] for group in groups]
    graded_G = [graded for graded in graded_G if graded]
    graded = [rollout for rollouts in graded_G for rollout in rollouts]
    found = {f"{prefix}/tasks": float(len(groups)), f"{prefix}/rollouts": float(len(rollouts))}
    if rollouts:
        found[f"{prefix}/failed_share"] = 1.0 - len(graded) / len(rollouts)
        found[f"{prefix}/truncated_share"] = sum(rollout.is_cut for rollout in rollouts) / len(rollouts)
        found[f"{prefix}/length_mean"] = average([rollout.response_length for rollout in rollouts])
    if not graded:
        return found
    shares = [average([float(_succeeds(one, success)) for one in rollouts]) for rollouts in graded_G]
    found[f"{prefix}/success"] = average(shares)
    found[f"{prefix}/success_stderr"] = standard_error(shares)
    found[f"{prefix}/reward_mean"] = average([rollout.reward or 0.0 for rollout in graded])
    rewards = [average([one.reward or 0.0 for one in rollouts]) for rollouts in graded_G]
    found[f"{prefix}/reward_stderr"] = standard_error(rewards)
    for k in ks:
        if chances := [_pass_at_k(rollouts, k, success) for rollouts in graded_G if len(rollouts) >= k]:
            found[f"{prefix}/pass_at_{k}"] = average(chances)
    for name in sorted({rollout.environment for rollout in graded}):
        own = [float(_succeeds(one, success)) for one in graded if one.environment == name]
        found[f"{prefix}/{metric_name(name)}/success"] = average(own)
    found |= label_metrics(groups, prefix, "success", lambda one: float(_succeeds(one, success)))
    return {**environment_metrics(groups, aggregate, prefix), **found}


def standard_error(shares: Sequence[float]) -> float:
    """Returns the standard error of the mean over tasks. Samples of one task are not independent, so tasks are what is
    counted."""
    if len(shares) < 2:
        return 0.0
    mean = average(shares)
    return math.sqrt(math.fsum((share - mean) ** 2 for share in shares) / (len(shares) - 1) / len(shares))


def _pass_at_k(rollouts: Sequence[Rollout], k: int, success: float) -> float:
    return pass_at_k(sum(_succeeds(one, success) for one in rollouts), len(rollouts), k)


def _succeeds(rollout: Rollout, success: float) -> bool:
    return rollout.reward is not None and rollout.reward >= success
