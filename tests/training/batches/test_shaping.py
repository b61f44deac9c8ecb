"""Penalties: what is taken off, where it begins, and that the record keeps the reward as it was given."""

from __future__ import annotations

import pytest

from palestra.config.train import PenaltyConfig
from palestra.training.batches.grpo_batch import to_sequence
from palestra.training.batches.shaping import add_kl_penalty, shaped_reward
from palestra.types import StopReason
from tests.training.records import make_rollout, make_turn


def test_without_penalties_the_reward_is_the_reward():
    rollout = make_rollout(reward=0.3, turns=[make_turn(50, cut=True)], metrics={"parse_error": 1.0})
    assert shaped_reward(rollout, PenaltyConfig(), max_context=40) == 0.3


# prompt 2, observation 4, sampled 10 + n: the limit is 100, the window 20
@pytest.mark.parametrize(
    ("sampled", "taken"), [(10, 0.0), (64, 0.0), (74, 0.25), (79, 0.375), (84, 0.5), (94, 0.5), (0, 0.0)]
)
def test_the_length_penalty_rises_over_the_window_and_counts_every_token(sampled, taken):
    turns = [make_turn(10), make_turn(sampled, observation=4)]
    rollout = make_rollout(reward=1.0, turns=turns)
    penalty = PenaltyConfig(length=0.5, length_window=20)
    assert shaped_reward(rollout, penalty, max_context=100) == pytest.approx(1.0 - taken)
    assert rollout.reward == 1.0


@pytest.mark.parametrize(("metrics", "taken"), [({}, 0), ({"parse_error": 0.0}, 0), ({"parse_error": 2.0}, 0.25)])
def test_the_format_penalty_needs_the_environments_word(metrics, taken):
    rollout = make_rollout(reward=1.0, metrics=metrics)
    assert shaped_reward(rollout, PenaltyConfig(format=0.25), 100) == 1.0 - taken


@pytest.mark.parametrize(("stop", "taken"), [(StopReason.STOP, 0), (StopReason.LENGTH, 0.5), (StopReason.ABORT, 0.5)])
def test_the_cut_penalty_is_for_a_last_turn_without_an_end(stop, taken):
    turn = make_turn()
    turn.stop = stop
    rollout = make_rollout(reward=0.0, turns=[make_turn(cut=True), turn])
    assert shaped_reward(rollout, PenaltyConfig(cut=0.5), 100) == -taken


def test_an_ungraded_rollout_cannot_be_shaped():
    with pytest.raises(ValueError, match="g-0 has no reward"):
        shaped_reward(make_rollout(reward=None), PenaltyConfig(), 100)


def test_the_kl_penalty_compares_tokens_with_the_batchs_mean():
    near = to_sequence(make_rollout("g-0", turns=[make_turn(2, logprob=-1.0)]), 1.0, 100)
    far = to_sequence(make_rollout("g-1", turns=[make_turn(2, observation=1, logprob=-1.0)]), -1.0, 100)
    # d: 0, 0 and 2, 2; their mean is 1
    base = {"g-0": [0, -9, -1, -1], "g-1": [0, -9, -9, -3, -3, -7]}
    add_kl_penalty([near, far], base, 0.1)
    assert near.advantages == pytest.approx([0, 0, 1.1, 1.1])
    assert far.advantages == pytest.approx([0, 0, 0, -1.1, -1.1])


def test_a_kl_penalty_on_a_sequence_without_sampled_tokens_changes_nothing():
    fixed = to_sequence(make_rollout("g-0"), 1.0, 100)
    fixed.mask[:] = [0] * len(fixed.mask)
    before = list(fixed.advantages)
    add_kl_penalty([fixed], {"g-0": [-1.0] * 5}, 0.1)
    assert fixed.advantages == before
    add_kl_penalty([], {}, 0.1)


@pytest.mark.parametrize(("base", "have"), [({}, "none"), ({"g-0": [0.0, 0.0]}, "2")])
def test_missing_base_logprobs_are_named(base, have):
    with pytest.raises(ValueError, match=f"rollout g-0: {have} reference logprobs for 5 tokens"):
        add_kl_penalty([to_sequence(make_rollout(), 1.0, 100)], base, 0.1)
