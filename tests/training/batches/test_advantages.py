"""Advantages: numbers one can check by hand, and nothing learned where rewards do not differ."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.config.train import AdvantageKind as Kind
from palestra.training.batches.advantages import are_equal, group_advantages
from palestra.types.rollouts import LARGEST_REWARD

REWARDS = st.floats(-LARGEST_REWARD, LARGEST_REWARD)

# mean 0.25, std sqrt(3)/4 = 0.4330127...
TABLE = [
    (Kind.GRPO, [1, 0, 0, 0], [1.7320468, -0.5773489, -0.5773489, -0.5773489]),
    (Kind.MEAN_BASELINE, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
    (Kind.LEAVE_ONE_OUT, [1, 0, 0, 0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
    (Kind.DR_GRPO, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
    (Kind.GRPO, [3, 1], [1 / (1 + 1e-6), -1 / (1 + 1e-6)]),
    (Kind.LEAVE_ONE_OUT, [3, 1], [2, -2]),
    (Kind.LEAVE_ONE_OUT, [4, 1, 1], [3, -1.5, -1.5]),
    (Kind.MEAN_BASELINE, [-2, 0, 5], [-3, -1, 4]),
]


@pytest.mark.parametrize(("kind", "rewards", "expected"), TABLE)
def test_advantages_are_those_computed_by_hand(kind, rewards, expected):
    assert group_advantages(rewards, kind) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("rewards", [[], [0.7], [0.1] * 3, [1e29 / 3] * 7, [1.0, 1.0 + 1e-9]])
def test_rewards_that_do_not_differ_teach_exactly_nothing(kind, rewards):
    assert group_advantages(rewards, kind) == [0.0] * len(rewards)
    assert are_equal(rewards)


@given(st.lists(REWARDS, max_size=12), st.sampled_from(Kind))
def test_advantages_are_finite_add_up_to_nothing_and_keep_the_order(rewards, kind):
    advantages = group_advantages(rewards, kind)
    assert all(map(math.isfinite, advantages))
    assert abs(math.fsum(advantages)) <= 1e-9 * max(map(abs, [1.0, *advantages, *rewards]))
    by_reward = sorted(zip(rewards, advantages, strict=True))
    assert [a for _, a in by_reward] == sorted(a for _, a in by_reward)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_grpo_does_not_care_about_scale_and_place(rewards):
    moved = [100 * reward + 7 for reward in rewards]
    for one, other in zip(group_advantages(rewards, Kind.GRPO), group_advantages(moved, Kind.GRPO), strict=True):
        assert one == pytest.approx(other, abs=2e-3) or are_equal(rewards) or max(rewards) - min(rewards) < 1e-2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e31])
def test_what_is_no_usable_number_is_refused(bad):
    with pytest.raises(ValueError, match="rewards must be numbers"):
        group_advantages([0.0, bad], Kind.GRPO)
