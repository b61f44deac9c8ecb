"""Converts the calls of a model to training data: which call continued which, by their token ids alone."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from msgspec import Struct


class SampledTokens(Struct, frozen=True, kw_only=True):
    tokens: Sequence[int]
    logprobs: Sequence[float]


class ModelCall(Struct, frozen=True, kw_only=True):
    prompt: Sequence[int]
    """The whole prompt."""
    samples: Sequence[SampledTokens]


class SampleRef(Struct, frozen=True):
    call: int
    sample: int


class Trajectory(Struct, frozen=True, kw_only=True):
    """A whole conversation, up to an answer that no call continued."""

    tokens: list[int]
    loss_mask: list[int]
    """1 for sampled tokens. Branches share a beginning: its samples count in the first of them only, so that every
    sampled token is in the loss of exactly one trajectory."""
    logprobs: list[float]
    """0 for tokens that were read."""
    turns: list[SampleRef]


def trajectories(calls: Sequence[ModelCall]) -> list[Trajectory]:
    """Joins calls. A call continues the longest earlier sample whose prompt and tokens its own prompt begins with;
    among equals the newest. `calls` are in the order they were made."""
    wholes: dict[bytes, SampleRef] = {}
    lengths: set[int] = set()
    parents: list[SampleRef | None] = []
    for number, call in enumerate(calls):
        prompt = array("i", call.prompt)
        fitting = (n for n in sorted(lengths, reverse=True) if n <= len(prompt))
        parents.append(next((ref for n in fitting if (ref := wholes.get(prompt[:n].tobytes())) is not None), None))
        for index, sample in enumerate(call.samples):
            whole = prompt + array("i", sample.tokens)
            wholes[whole.tobytes()] = SampleRef(number, index)
            lengths.add(len(whole))
    went_on = {parent for parent in parents if parent is not None}
    leaves = [SampleRef(n, i) for n, call in enumerate(calls) for i in range(len(call.samples))]
    counted: set[SampleRef] = set()
    return [_trajectory(calls, parents, leaf, counted) for leaf in leaves if leaf not in went_on]


def _trajectory(
    calls: Sequence[ModelCall], parents: Sequence[SampleRef | None], leaf: SampleRef, counted: set[SampleRef]
) -> Trajectory:
    turns, step = [leaf], parents[leaf.call]
    while step is not None:
        turns.append(step)
        step = parents[step.call]
    turns.reverse()
    last = calls[leaf.call]
    tokens = [*last.prompt, *last.samples[leaf.sample].tokens]
    mask, logprobs = [0] * len(tokens), [0.0] * len(tokens)
    for ref in turns:
        sample, start = calls[ref.call].samples[ref.sample], len(calls[ref.call].prompt)
        end = start + len(sample.tokens)
        logprobs[start:end] = sample.logprobs
        if ref not in counted:
            mask[start:end] = [1] * len(sample.tokens)
    counted.update(turns)
    return Trajectory(tokens=tokens, loss_mask=mask, logprobs=logprobs, turns=turns)
