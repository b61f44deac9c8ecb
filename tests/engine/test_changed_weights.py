"""Samples of a worker that go on with other weights, wherever they are when the message comes."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.server.core.samples.weights_changes import MOST_SEQUENCES, WeightsChanges, changes_of
from palestra.types import SampledSequence, SampleResult, StopReason
from palestra.types.engine import Blame, ChangeWeights, EngineFailure, KeptSampler, Sampled
from palestra.types.sampling import WeightsChange

LONG = {"max_tokens": 24, "stop_token_ids": (), "temperature": 1.0}


def answer_to(desk: Any, name: str) -> Sampled:
    (found,) = [m for m in desk.sent if isinstance(m, Sampled) and m.request_id == name]
    return found


@pytest.fixture
def kept(desk: Any) -> list[KeptSampler]:
    """Samplers of three versions of a model."""
    desk.create("a")
    found = []
    for seed in range(3):
        desk.step("a", seed=seed)
        found.append(desk.keep("a", f"s{seed}"))
        desk.run()
    return found


@pytest.mark.parametrize("keeps_keys", [False, True])
def test_running_queued_and_waiting_samples_go_on_with_other_weights(
    desk: Any, kept: list[KeptSampler], keeps_keys: bool
) -> None:
    old, new, _ = kept
    running = desk.sample(old, **LONG)
    desk.samples.quantum(0.0)
    queued = desk.sample(old, **LONG)
    waiting = desk.sample(desk.keep("a", "not made yet"), **LONG)
    names = [running, queued, waiting]
    desk.samples.change_weights(ChangeWeights(request_ids=[*names, "unknown"], weights=new, keeps_keys=keeps_keys))
    desk.run()
    assert [answer_to(desk, name).weights for name in names] == ["s0", "s1", "s1"]
    first, *others = [answer_to(desk, name).outcome.sequences[0] for name in names]
    (change,) = first.changes
    assert (change.weights, change.start > 0, change.is_exact) == ("s1", True, not keeps_keys)
    assert [one.changes for one in others] == [[], []]
    assert not desk.samples._pinned
    assert not desk.backend.sampler.weights_in_use


def test_a_sample_whose_new_weights_are_gone_ends_on_its_own(desk: Any, kept: list[KeptSampler]) -> None:
    running = desk.sample(kept[0], **LONG)
    desk.samples.quantum(0.0)
    gone = KeptSampler(sampler_id="gone", model_id="a", seq_id=0)
    desk.samples.change_weights(ChangeWeights(request_ids=[running], weights=gone, keeps_keys=False))
    desk.run()
    (sequence,) = answer_to(desk, running).outcome.sequences
    assert (len(sequence.tokens), sequence.changes) == (24, [])


def sampled(weights: str, *changes: list[WeightsChange]) -> Sampled:
    options = {"tokens": [1], "logprobs": [0.0], "stop_reason": StopReason.STOP}
    sequences = [SampledSequence(**options, changes=own) for own in changes]
    return Sampled(request_id="r", outcome=SampleResult(sequences=sequences), weights=weights)


def test_changes_are_told_from_the_weights_that_a_client_named() -> None:
    later, at_once = [WeightsChange(5, "c")], [WeightsChange(0, "c")]
    assert changes_of(sampled("a", later, []), "a") == [later, []]
    assert changes_of(sampled("b", later, [], at_once), "a") == [
        [WeightsChange(0, "b"), *later],
        [WeightsChange(0, "b")],
        at_once,
    ]
    assert changes_of(sampled("", []), "a") == [[]]  # weights that are no kept sampler's never change
    failed = Sampled(request_id="r", outcome=EngineFailure(message="", blame=Blame.SERVER), weights="b")
    assert changes_of(failed, "a") == []


def test_changes_are_kept_for_their_owner_and_the_oldest_go_first() -> None:
    changes, one = WeightsChanges(), [WeightsChange(1, "b")]
    changes.keep("alice", ["x", "y"], [one, []])
    assert (changes.find("alice", "x"), changes.find("bob", "x"), changes.find("alice", "y")) == (one, [], [])
    changes.keep("bob", [str(number) for number in range(MOST_SEQUENCES)], [one] * MOST_SEQUENCES)
    assert changes.find("alice", "x") == []
    assert changes.find("bob", "0") == one
