"""The entropy bonus: keeps the policy exploring by the advantages of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from palestra.types.rollouts import TrainSequence


def add_entropy_bonus(sequences: Sequence[TrainSequence], coefficient: float) -> None:
    """Keeps the policy exploring: adds coefficient x (mean - logprob) to the advantage of each sampled token.

    The gradient of the entropy -E[log p] is E[(-log p) d log p]: a policy gradient in which a token's reward is its
    negative logprob. The mean over all sampled tokens of the batch is its baseline.
    """
    logprobs_B = [
        [logprob for logprob, sampled in zip(sequence.logprobs, sequence.mask, strict=True) if sampled]
        for sequence in sequences
    ]
    favour_low(sequences, logprobs_B, coefficient)


def favour_low(sequences: Sequence[TrainSequence], values: Sequence[Sequence[float]], coefficient: float) -> None:
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
