"""Advantages from teachers: the negative reverse KL of each sampled token.

For a sampled token, let d be its logprob under the student that sampled it minus that under the teacher. The mean of d
over what the student samples is KL(student || teacher), and a policy gradient with the advantage -d lowers it. As in
Tinker's cookbook, nothing is subtracted from -d, and with a discount each token also gets its share of what follows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from palestra.config.distillation import DistillationConfig
from palestra.training.batches.kl_penalty import divergence
from palestra.types.rollouts import TrainSequence
from palestra.types.sampling import TopLogprobs


def add_teacher_advantages(
    sequences: Sequence[TrainSequence], teacher_logprobs: Mapping[str, Sequence[float]], settings: DistillationConfig
) -> None:
    """Makes the advantage of each sampled token reward_weight x (what its reward gives) - kl_weight x d. Other tokens
    get 0, also with a discount."""
    for sequence in sequences:
        gains = _at_sampled(sequence, [-settings.kl_weight * d for d in divergence(sequence, teacher_logprobs)])
        if settings.kl_discount:
            gains = discounted(gains, settings.kl_discount)
        sequence.advantages = [
            settings.reward_weight * advantage + gain if sampled else 0.0
            for advantage, gain, sampled in zip(sequence.advantages, gains, sequence.mask, strict=True)
        ]


def add_teacher_tokens(
    sequences: Sequence[TrainSequence], top: Mapping[str, Sequence[TopLogprobs | None]], settings: DistillationConfig
) -> None:
    """Notes for each sampled token what its teacher would most likely have said. The advantages become the weights of
    the divergences there (`divergences`)."""
    for sequence in sequences:
        pairs = zip(top[sequence.rollout], sequence.mask, strict=False)
        sequence.teacher_top = [one for one, sampled in pairs if sampled and one is not None]
        if len(sequence.teacher_top) != sum(sequence.mask):
            raise ValueError(
                f"rollout {sequence.rollout}: a teacher says what is likely at {len(sequence.teacher_top)} of "
                f"{sum(sequence.mask)} sampled tokens"
            )
        sequence.advantages = [settings.kl_weight if sampled else 0.0 for sampled in sequence.mask]


def discounted(values: Sequence[float], discount: float) -> list[float]:
    """Returns, for each value, itself plus all later ones, each times `discount` for every position in between."""
    found, following = [0.0] * len(values), 0.0
    for index in range(len(values) - 1, -1, -1):
        following = values[index] + discount * following
        found[index] = following
    return found


def _at_sampled(sequence: TrainSequence, values: Sequence[float]) -> list[float]:
    """Puts one value at each sampled token, and 0 at the others."""
    remaining = iter(values)
    return [next(remaining) if sampled else 0.0 for sampled in sequence.mask]
