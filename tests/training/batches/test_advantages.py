"""Advantages: numbers one can check by hand, and nothing learned where rewards do not differ."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.config.algorithm import AdvantageKind as Kind
from palestra.training.batches.advantages import (
    are_equal,
    decoupled_advantages,
    group_advantages,
    step_advantages,
)
from palestra.types.rollouts import LARGEST_REWARD
from tests.properties import examples

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
    (Kind.MAXRL, [1, 0, 0, 0], [3, -1, -1, -1]),
    (Kind.MAXRL, [1, 1, 1, 0], [1 / 3, 1 / 3, 1 / 3, -1]),
    (Kind.MAXRL, [-1, 0], [0, 0]),
    (Kind.PASS_AT_K, [1, 0, 0, 0], [2, 0, 0, 0]),  # it makes 3 of 6 pairs succeed: 3 / 6 x 4
    (Kind.PASS_AT_K, [1, 1, 0, 0], [4 / 3, 4 / 3, 0, 0]),
]
OF_GROUPS = [kind for kind in Kind if kind not in (Kind.BATCH_STD, Kind.REINFORCE_PP, Kind.GDPO)]
CENTRED = [kind for kind in OF_GROUPS if kind is not Kind.PASS_AT_K]


@pytest.mark.parametrize(("kind", "rewards", "expected"), TABLE)
def test_advantages_are_those_computed_by_hand(kind, rewards, expected):
    assert group_advantages(rewards, kind, pass_k=2) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", OF_GROUPS)
@pytest.mark.parametrize("rewards", [[], [0.7], [0.1] * 3, [1e29 / 3] * 7, [1.0, 1.0 + 1e-9]])
def test_rewards_that_do_not_differ_teach_exactly_nothing(kind, rewards):
    assert group_advantages(rewards, kind) == [0.0] * len(rewards)
    assert are_equal(rewards)


@given(st.lists(REWARDS, max_size=12), st.sampled_from(CENTRED))
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


SMALL = st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.5]), min_size=1, max_size=7)


@given(SMALL, st.integers(1, 8))
@examples(60)
def test_pass_at_k_is_what_each_rollout_adds_to_the_best_of_all_sets_of_k(rewards, k):
    n = len(rewards)
    k_of_group = min(k, n)
    expected = []
    for one in range(n):
        others = [place for place in range(n) if place != one]
        gains = [
            max(rewards[one] - max(rewards[other] for other in chosen), 0.0)
            if chosen
            else rewards[one] - statistics.fmean(rewards[other] for other in others)
            for chosen in itertools.combinations(others, k_of_group - 1)
            if others
        ]
        expected.append(n * sum(gains) / math.comb(n, k_of_group) if k_of_group > 1 else sum(gains))
    assert group_advantages(rewards, Kind.PASS_AT_K, k) == pytest.approx(expected, abs=1e-9)


@given(st.lists(SMALL, min_size=1, max_size=4))
@examples(60)
def test_a_step_is_compared_with_all_its_rewards(groups):
    rewards = [reward for group in groups for reward in group]
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards) + 1e-6
    if std < 1e-5:
        expected = [[[0.0] * len(group) for group in groups]] * 2
    else:
        plus = [[(reward - mean) / std for reward in group] for group in groups]
        expected = [plus, [[(reward - statistics.fmean(group)) / std for reward in group] for group in groups]]
    for kind, wanted in zip((Kind.REINFORCE_PP, Kind.BATCH_STD), expected, strict=True):
        for found, one in zip(step_advantages(groups, kind), wanted, strict=True):
            assert found == pytest.approx(one, abs=1e-9)


def test_parts_of_a_reward_are_normalised_apart():
    """The second part differs a hundred times less, and counts as much."""
    parts = [{"solved": [1.0, 0.0, 0.0, 1.0], "short": [0.01, 0.0, 0.01, 0.0]}, {"solved": [1.0, 1.0], "short": [0, 1]}]
    weights = {"solved": 1.0, "short": 0.5}
    sums = [1.5, -1.5, -0.5, 0.5, -0.5, 0.5]
    mean, std = statistics.fmean(sums), statistics.pstdev(sums)
    first, second = decoupled_advantages(parts, weights)
    assert [*first, *second] == pytest.approx([(one - mean) / std for one in sums], rel=1e-3)
