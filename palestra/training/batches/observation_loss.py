"""The observation loss (ECHO): the policy also learns to predict what the environment says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from palestra.types.rollouts import TrainSequence


def add_observation_loss(
    sequences: Sequence[TrainSequence],
    prompts: Sequence[int],
    own_logprobs: Mapping[str, Sequence[float]],
    weight: float,
) -> float | None:
    """Lets the policy predict what it read after the prompt, of which `prompts` are the lengths. A loss compares the
    policy with `logprobs`: with the trainer's own, its ratio begins at 1, and an advantage of `weight` has the gradient
    of cross entropy. Returns the mean logprob of these tokens; None if there are none. Rows of
    pictures are predicted by nothing."""
    found: list[float] = []
    for sequence, start in zip(sequences, prompts, strict=True):
        own = own_logprobs[sequence.rollout]
        seen = {place for one in sequence.pictures for place in range(one.start, one.end)}
        places = [place for place, sampled in enumerate(sequence.sampled) if place >= start and not sampled]
        places = [place for place in places if place not in seen]
        for place in places:
            sequence.logprobs[place], sequence.advantages[place] = own[place], weight
            found.append(own[place])
    return math.fsum(found) / len(found) if found else None
