"""Stored model calls as trajectories for training."""

from __future__ import annotations

from collections.abc import Iterable

from palestra.chat.trajectories import ModelCall, SampledTokens, Trajectory, trajectories
from palestra.store.queries.traces import TraceTurn


def trajectories_of(turns: Iterable[TraceTurn]) -> list[Trajectory]:
    return trajectories([ModelCall(prompt=turn.prompt, samples=_samples(turn)) for turn in turns])


def _samples(turn: TraceTurn) -> list[SampledTokens]:
    return [SampledTokens(tokens=s.tokens, logprobs=s.logprobs) for s in turn.samples]
