"""Stored model calls as trajectories for training."""

from __future__ import annotations

from collections.abc import Iterable

from palestra.chat.trajectories import ModelCall, SampledTokens, Trajectory, trajectories
from palestra.store.queries.traces import TraceTurn


def trajectories_of(turns: Iterable[TraceTurn]) -> list[Trajectory]:
    calls = []
    for turn in turns:
        samples = [SampledTokens(tokens=one.tokens, logprobs=one.logprobs) for one in turn.samples]
        calls.append(ModelCall(prompt=turn.prompt, samples=samples))
    return trajectories(calls)
