"""Advantages of parts of turns, which a process reward or a judge has graded.

A token in a span with reward r gets weight x (r - m) in addition, with m the mean reward of all spans of the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from palestra.training.batches.advantages import are_equal
from palestra.types.rollouts import Branch, Rollout, TrainSequence


def spans_mean(rollouts: Sequence[Rollout]) -> float:
    """The mean reward of all spans; 0 if there are none."""
    rewards = list(_rewards(rollouts))
    return fmean(rewards) if rewards else 0.0


def spans_teach(rollouts: Sequence[Rollout]) -> bool:
    """Whether some spans have other rewards than others."""
    return not are_equal(list(_rewards(rollouts)))


def add_span_credit(sequence: TrainSequence, row: Branch, mean: float, weight: float) -> None:
    place = len(row.prompt)
    for turn in row.turns:
        place += len(turn.observation)
        for span in turn.spans:
            for at in range(place + span.start, min(place + min(span.end, len(turn.tokens)), len(sequence.tokens))):
                sequence.advantages[at] += weight * (span.reward - mean)
        place += len(turn.tokens)


def _rewards(rollouts: Sequence[Rollout]) -> Iterator[float]:
    return (span.reward for rollout in rollouts for turn in rollout.all_turns for span in turn.spans)
