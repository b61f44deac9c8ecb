"""Calls become training data by exact prefix: every sampled token is in one loss, nothing that was only read is."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from palestra.chat.trajectories import ModelCall, SampledTokens, SampleRef, trajectories


def call(prompt: list[int], *samples: list[int]) -> ModelCall:
    drawn = [SampledTokens(tokens=s, logprobs=[-float(t) for t in s]) for s in samples]
    return ModelCall(prompt=prompt, samples=drawn)


def test_a_conversation_is_one_trajectory() -> None:
    (only,) = trajectories([call([1, 2], [3, 4]), call([1, 2, 3, 4, 9, 5], [6])])
    assert only.tokens == [1, 2, 3, 4, 9, 5, 6]
    assert only.loss_mask == [0, 0, 1, 1, 0, 0, 1]
    assert only.logprobs == [0, 0, -3, -4, 0, 0, -6]
    assert only.turns == [SampleRef(0, 0), SampleRef(1, 0)]


def test_branches_share_a_beginning_that_counts_once() -> None:
    first, second = trajectories([call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 5], [6])])
    assert (first.tokens, first.loss_mask) == ([1, 2, 3, 4], [0, 1, 0, 1])
    assert (second.tokens, second.loss_mask) == ([1, 2, 5, 6], [0, 0, 0, 1])


def test_choices_that_nothing_went_on_from_stand_alone() -> None:
    found = trajectories([call([1], [2], [3]), call([1, 3, 4], [5])])
    assert [t.tokens for t in found] == [[1, 2], [1, 3, 4, 5]]
    assert [t.loss_mask for t in found] == [[0, 1], [0, 1, 0, 1]]


def test_a_prompt_that_differs_in_one_token_goes_on_from_nothing() -> None:
    found = trajectories([call([1, 2], [3]), call([1, 2, 4, 5], [6])])
    assert [t.tokens for t in found] == [[1, 2, 3], [1, 2, 4, 5, 6]]


def test_nothing_gives_nothing() -> None:
    assert trajectories([]) == []


@given(st.integers(0, 2**32))
def test_every_sampled_token_is_in_one_loss(seed: int) -> None:
    rng = random.Random(seed)
    calls: list[ModelCall] = []
    fresh = iter(range(1, 10_000))
    for _ in range(rng.randint(1, 8)):
        prompt: list[int] = []
        if calls and rng.random() < 0.8:
            before = rng.choice(calls)
            prompt = [*before.prompt, *rng.choice(before.samples).tokens]
        prompt += [next(fresh) for _ in range(rng.randint(0 if prompt else 1, 3))]
        calls.append(call(prompt, *([next(fresh) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 2)))))
    found = trajectories(calls)
    counted = [t for one in found for t, in_loss in zip(one.tokens, one.loss_mask, strict=True) if in_loss]
    assert sorted(counted) == sorted(t for c in calls for s in c.samples for t in s.tokens)
    for one in found:
        assert all(p == (-t if p else 0) for t, p in zip(one.tokens, one.logprobs, strict=True))
