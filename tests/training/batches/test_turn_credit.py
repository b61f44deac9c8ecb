"""Credit for single turns: returns, comparable turns, and how both become the advantages of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.config.algorithm import AlgorithmConfig
from palestra.training.batches.compared_rewards import is_zero_variance
from palestra.training.batches.grpo_batch import build_batch
from palestra.training.batches.turn_credit import credit_turns, discounted
from palestra.types.rollouts import Group
from tests.properties import examples
from tests.training.records import group_of, make_config, make_rollout, make_turn


def played(*rewards_by_turn: list[float], states: dict[tuple[int, int], int] | None = None) -> Group:
    """Rollouts whose turns have these rewards; a turn's state is its number, or that of `states`."""
    rollouts = []
    for i, rewards in enumerate(rewards_by_turn):
        turns = [
            make_turn(2, observation=(states or {}).get((i, t), t), reward=reward) for t, reward in enumerate(rewards)
        ]
        rollouts.append(make_rollout(f"g-{i}", sum(rewards), turns))
    return group_of("g", rollouts)


def algorithm(**turns: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"turns": turns, "normalize": "none"})


def credit(group: Group, **turns: object) -> list[list[float]]:
    rows = [row for rollout in group.rollouts for row in rollout.rows]
    return list(credit_turns(rows, algorithm(**turns)).by_row.values())


def test_a_turn_is_compared_by_what_came_from_it_on():
    group = played([1.0, 0.0, 0.0], [0.0, 0.0, 1.0])
    assert credit(group, compare="turn") == [[0.0, -0.5, -0.5], [0.0, 0.5, 0.5]]
    assert credit(group, compare="turn", discount=0.5) == [[0.375, -0.25, -0.5], [-0.375, 0.25, 0.5]]


def test_a_turn_without_company_has_no_advantage():
    assert credit(played([0.0, 1.0, 1.0], [0.0]), compare="turn") == [[1.0, 0.0, 0.0], [-1.0]]


def test_with_state_turns_that_saw_the_same_are_compared_wherever_they_stand():
    # The first rollout is in state 7 twice, and leaves it for the reward the second time; the other at once.
    states = {(0, 1): 7, (0, 2): 7, (1, 1): 7}
    group = played([0.0, 0.0, 1.0], [0.0, 1.0], states=states)
    assert credit(group, compare="state", discount=0.5) == [
        [pytest.approx(-0.125), pytest.approx(0.5 - 2.5 / 3), pytest.approx(1 - 2.5 / 3)],
        [pytest.approx(0.125), pytest.approx(1 - 2.5 / 3)],
    ]


def test_tokens_have_the_mixture_of_both_advantages():
    config = make_config(algorithm=algorithm(compare="turn", weight=0.25).model_dump())
    first, second = build_batch([played([1.0, 0.0], [0.0, 0.0])], config).sequences
    assert first.advantages == [0, 0, *[0.75 * 0.5 + 0.25 * 0.5] * 2, 0, *[0.75 * 0.5] * 2]
    assert second.advantages == [0, 0, *[-0.5] * 2, 0, *[-0.75 * 0.5] * 2]


def test_groups_whose_sums_are_equal_teach_by_their_turns():
    group = played([1.0, 0.0], [0.0, 1.0])
    assert is_zero_variance(group, make_config())
    config = make_config(algorithm=algorithm(compare="turn").model_dump())
    assert not is_zero_variance(group, config)
    batch = build_batch([group], config)
    assert [row.advantages[-1] for row in batch.sequences] == [-0.25, 0.25]
    assert batch.credit is not None
    assert (batch.credit.compared_share, batch.credit.advantage_abs_mean) == (1.0, 0.25)


def test_failed_rollouts_are_in_no_comparison():
    group = played([1.0, 0.0], [0.0, 0.0])
    group.rollouts.append(make_rollout("g-2", None, [make_turn(2, reward=9.0)]))
    config = make_config(algorithm=algorithm(compare="turn", weight=1.0).model_dump())
    found = build_batch([group], config)
    assert [row.advantages[2] for row in found.sequences] == [0.5, -0.5]


def test_rewards_of_turns_would_reveal_shuffled_ones():
    with pytest.raises(ValueError, match="those of turns would reveal them"):
        make_config(algorithm={"turns": {"compare": "turn"}, "shuffle_rewards": True})


@given(st.lists(st.floats(-5, 5), max_size=8), st.floats(0.1, 1.0))
@examples(40)
def test_a_return_is_the_sum_of_what_comes(rewards, discount):
    (row,) = make_rollout(turns=[make_turn(reward=one) for one in rewards]).rows
    expected = [sum(r * discount**k for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    assert discounted(row, discount) == pytest.approx(expected, abs=1e-9)
