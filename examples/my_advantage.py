"""An advantage of one's own. In this folder: palestra train stockroom algorithm.advantage=my_advantage:brevity"""

from collections.abc import Sequence
from statistics import fmean

from palestra.training.custom_functions import Rollout


def brevity(rewards: Sequence[float], rollouts: Sequence[Rollout]) -> list[float]:
    """Compares with the group's mean, and praises an answer less, the longer it is than the shortest good one."""
    mean = fmean(rewards)
    lengths = [max(1, rollout.response_length) for rollout in rollouts]
    good = [length for reward, length in zip(rewards, lengths, strict=True) if reward > mean]
    return [
        (reward - mean) * (min(good) / length if reward > mean else 1.0)
        for reward, length in zip(rewards, lengths, strict=True)
    ]
