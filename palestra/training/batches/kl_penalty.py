"""The KL penalty: keeps the policy near a reference by the advantages of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from palestra.config.algorithm import PenaltyConfig
from palestra.training.batches.entropy_bonus import favour_low
from palestra.types.rollouts import TrainSequence

MOST = 20.0  # nats: what is farther from the base model has an exponential that says nothing more


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
        favour_low(sequences, values_B, penalty.kl)
        return
    for sequence, values in zip(sequences, values_B, strict=True):
        slopes = iter(values if penalty.kl_form == "k2" else [-math.expm1(-min(max(d, -MOST), MOST)) for d in values])
        sequence.advantages = [
            advantage - penalty.kl * next(slopes) if sampled else 0.0
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
