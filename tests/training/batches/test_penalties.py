"""Penalties: what is taken off, where it begins, and that the record keeps the reward as it was given."""

from __future__ import annotations

import pytest
import torch

from palestra.config.algorithm import PenaltyConfig
from palestra.training.batches.advantages import shaped_reward
from palestra.training.batches.grpo_batch import build_batch, to_sequence
from palestra.training.batches.kl_penalty import add_kl_penalty
from palestra.types import StopReason
from tests.training.records import group_of, make_config, make_rollout, make_turn


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
    add_kl_penalty([near, far], base, PenaltyConfig(kl=0.1))
    assert near.advantages == pytest.approx([0, 0, 1.1, 1.1])
    assert far.advantages == pytest.approx([0, 0, 0, -1.1, -1.1])


@pytest.mark.parametrize(
    ("form", "estimate"), [("k2", lambda d: d.square() / 2), ("k3", lambda d: torch.exp(-d) + d - 1)]
)
def test_other_forms_of_the_kl_have_the_gradient_of_the_estimate(form, estimate):
    row = to_sequence(make_rollout("g-0", turns=[make_turn(3, logprob=-1.0)]), 0.0, 100)
    base = [-1.5, -1.0, -0.2]
    add_kl_penalty([row], {"g-0": [0, -9, *base]}, PenaltyConfig(kl=0.5, kl_form=form))
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    (slopes,) = torch.autograd.grad(0.5 * estimate(logprobs - torch.tensor(base)).sum(), logprobs)
    assert row.advantages == pytest.approx([0, 0, *(-slopes).tolist()], rel=1e-6)


def test_turns_cost_as_much_as_the_group_passes():
    rollout = make_rollout(reward=1.0, turns=[make_turn(), make_turn(observation=1), make_turn(observation=1)])
    always, by_rate = PenaltyConfig(turn=0.1), PenaltyConfig(turn=0.1, by_pass_rate=True)
    assert shaped_reward(rollout, always, 100, 0.25) == pytest.approx(0.8)
    assert shaped_reward(rollout, by_rate, 100, 0.25) == pytest.approx(0.95)
    group = group_of("g", [rollout, make_rollout("g-1", 0.0), make_rollout("g-2", 0.0), make_rollout("g-3", 0.0)])
    config = make_config(penalty={"turn": 0.1, "by_pass_rate": True}, algorithm={"normalize": "none"})
    found = build_batch([group], config).sequences
    assert max(row.advantages[-1] for row in found) == pytest.approx(0.95 - 0.95 / 4)


def test_a_kl_penalty_on_a_sequence_without_sampled_tokens_changes_nothing():
    fixed = to_sequence(make_rollout("g-0"), 1.0, 100)
    fixed.mask[:] = [0] * len(fixed.mask)
    before = list(fixed.advantages)
    add_kl_penalty([fixed], {"g-0": [-1.0] * 5}, PenaltyConfig(kl=0.1))
    assert fixed.advantages == before
    add_kl_penalty([], {}, PenaltyConfig(kl=0.1))


@pytest.mark.parametrize(("base", "have"), [({}, "none"), ({"g-0": [0.0, 0.0]}, "2")])
def test_missing_base_logprobs_are_named(base, have):
    with pytest.raises(ValueError, match=f"rollout g-0: {have} reference logprobs for 5 tokens"):
        add_kl_penalty([to_sequence(make_rollout(), 1.0, 100)], base, PenaltyConfig(kl=0.1))


def test_what_was_read_is_learned_with_the_gradient_of_cross_entropy():
    """By the losses' own formula, -exp(logprob - old) A: where nothing has moved, its derivative is -A."""
    turns = [make_turn(2), make_turn(2, observation=3)]
    group = group_of("g", [make_rollout("g-0", 1.0, turns), make_rollout("g-1", 0.0)])
    own = {"g-0": [0.0, -9.0, -0.5, -0.5, -1.0, -2.0, -3.0, -0.5, -0.5], "g-1": [0.0, -9.0, -0.5, -0.5, -0.5]}
    config = make_config(algorithm={"normalize": "none", "observation_loss": 0.25})
    batch = build_batch([group], config, own_logprobs=own)
    row = batch.sequences[0]
    assert row.advantages == [0, 0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.5, 0.5]
    assert row.logprobs == [0.0, 0.0, *own["g-0"][2:]]
    assert batch.observation_logprob == -2.0
    logprobs = torch.tensor(row.logprobs, dtype=torch.float64, requires_grad=True)
    advantages, old = torch.tensor(row.advantages, dtype=torch.float64), logprobs.detach().clone()
    (ours,) = torch.autograd.grad(-((logprobs - old).exp() * advantages).sum(), logprobs)
    read = slice(4, 7)
    (plain,) = torch.autograd.grad(-0.25 * logprobs[read].sum(), logprobs)
    assert torch.allclose(ours[read], plain[read], atol=1e-6)


@pytest.mark.parametrize("loss", ["gspo", "dro", "sapo", "my_module:loss"])
def test_a_loss_of_whole_sequences_does_not_go_with_what_was_read(loss: str):
    with pytest.raises(ValueError, match="goes with the losses importance_sampling, ppo and cispo"):
        make_config(algorithm={"observation_loss": 0.1, "loss": loss})
