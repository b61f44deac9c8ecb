"""Penalties that are subtracted from a reward, or from a token's advantage, before training.

Owns: penalties for length, format, cut answers and KL. Never touches: the raw reward, which stays in the record as it
was given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from palestra.config.train import PenaltyConfig
from palestra.types.rollouts import Branch, Rollout, TrainSequence


def shaped_reward(rollout: Rollout, penalty: PenaltyConfig, max_context: int) -> float:
    """Returns the reward that advantages are computed from. The rollout must be graded."""
    if rollout.reward is None:
        raise ValueError(f"rollout {rollout.id} has no reward to shape")
    reward = rollout.reward
    if penalty.length:
        reward -= penalty.length * overlength(rollout, penalty.length_window, max_context)
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


def add_kl_penalty(
    sequences: Sequence[TrainSequence], base_logprobs: Mapping[str, Sequence[float]], coefficient: float
) -> None:
    """Keeps the policy near the base model: adds coefficient x (mean - d) to the advantage of each sampled token.

    d is the token's logprob under the policy that sampled it minus that under the base model; mean is the mean of d
    over all sampled tokens of the batch. This is the form of Tinker's cookbook: subtracting the mean makes the penalty
    a comparison of tokens, so that it does not push all probabilities down at once.
    """
    divergences_B = [divergence(sequence, base_logprobs) for sequence in sequences]
    count = sum(map(len, divergences_B))
    if not count:
        return
    mean = math.fsum(d for divergences in divergences_B for d in divergences) / count
    for sequence, divergences in zip(sequences, divergences_B, strict=True):
        remaining = iter(divergences)
        sequence.advantages = [
            advantage + coefficient * (mean - next(remaining)) if sampled else 0.0
            for advantage, sampled in zip(sequence.advantages, sequence.mask, strict=True)
        ]


def divergence(sequence: TrainSequence, reference_logprobs: Mapping[str, Sequence[float]]) -> list[float]:
    """Returns policy minus reference logprob of each sampled token; its mean is the k1 estimate of KL(policy ||
    reference)."""
    reference = reference_logprobs.get(sequence.rollout)
    if reference is None or len(reference) < len(sequence.tokens):
        have = "none" if reference is None else str(len(reference))
        raise ValueError(
            f"rollout {sequence.rollout}: {have} reference logprobs for {len(sequence.tokens)} tokens; "
            "score the whole rollout with the reference model first"
        )
    return [
        own - other for own, other, sampled in zip(sequence.logprobs, reference, sequence.mask, strict=False) if sampled
    ]
