"""Penalties and bonuses that change a reward, or a token's advantage, before training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from palestra.config.algorithm import PenaltyConfig
from palestra.types.rollouts import Branch, Rollout, TrainSequence

MOST = 20.0  # nats: what is farther from the base model has an exponential that says nothing more


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


def add_kl_penalty(
    sequences: Sequence[TrainSequence], base_logprobs: Mapping[str, Sequence[float]], penalty: PenaltyConfig
) -> None:
    """Keeps the policy near a reference (the base model, or itself some steps ago), by the advantage of each sampled
    token.

    d is the token's logprob under the policy that sampled it minus that under the reference. k1 adds coefficient x
    (mean of d over the batch - d), the form of Tinker's cookbook: subtracting the mean makes the penalty a comparison
    of tokens, so that it does not push all probabilities down at once. k2 and k3 subtract the derivative of d^2 / 2, or
    of exp(-d) + d - 1, by the logprob: on-policy, that is their gradient in the loss.
    """
    values_B = [divergence(sequence, base_logprobs) for sequence in sequences]
    if penalty.kl_form == "k1":
        _favour_low(sequences, values_B, penalty.kl)
        return
    for sequence, values in zip(sequences, values_B, strict=True):
        slopes = iter(values if penalty.kl_form == "k2" else [-math.expm1(-min(max(d, -MOST), MOST)) for d in values])
        sequence.advantages = [
            advantage - penalty.kl * next(slopes) if sampled else 0.0
            for advantage, sampled in zip(sequence.advantages, sequence.mask, strict=True)
        ]


def add_observation_loss(
    sequences: Sequence[TrainSequence],
    prompts: Sequence[int],
    own_logprobs: Mapping[str, Sequence[float]],
    weight: float,
) -> float | None:
    """Lets the policy predict what it read after the prompt, of which `prompts` are the lengths. A loss compares the
    policy with `logprobs`: with the trainer's own, its ratio begins at 1, and an advantage of `weight` has the gradient
    of cross entropy. Returns the mean logprob of these tokens; None if there are none."""
    found: list[float] = []
    for sequence, start in zip(sequences, prompts, strict=True):
        own = own_logprobs[sequence.rollout]
        places = [place for place in range(start, len(sequence.tokens)) if not sequence.mask[place]]
        for place in places:
            sequence.logprobs[place], sequence.advantages[place] = own[place], weight
            found.append(own[place])
    return math.fsum(found) / len(found) if found else None


def add_entropy_bonus(sequences: Sequence[TrainSequence], coefficient: float) -> None:
    """Keeps the policy exploring: adds coefficient x (mean - logprob) to the advantage of each sampled token.

    The gradient of the entropy -E[log p] is E[(-log p) d log p]: a policy gradient in which a token's reward is its
    negative logprob. The mean over all sampled tokens of the batch is its baseline.
    """
    logprobs_B = [
        [logprob for logprob, sampled in zip(sequence.logprobs, sequence.mask, strict=True) if sampled]
        for sequence in sequences
    ]
    _favour_low(sequences, logprobs_B, coefficient)


def _favour_low(sequences: Sequence[TrainSequence], values: Sequence[Sequence[float]], coefficient: float) -> None:
    """Adds coefficient x (mean - value) to the advantage of each sampled token; `values` has those of each sequence."""
    count = sum(map(len, values))
    if not count:
        return
    mean = math.fsum(value for own in values for value in own) / count
    for sequence, own in zip(sequences, values, strict=True):
        remaining = iter(own)
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
