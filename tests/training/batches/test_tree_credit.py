"""Advantages from forks, compared with the definition: values of states as means of what follows from them."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from palestra.config.algorithm import AlgorithmConfig
from palestra.training.batches.advantages import shaped_reward
from palestra.training.batches.compared_rewards import is_zero_variance
from palestra.training.batches.grpo_batch import DropReason, build_batch, scorable_rows
from palestra.training.batches.tree_credit import credit_tree
from palestra.types.rollouts import Group, Rollout, RolloutStop
from tests.training.records import group_of, make_config, make_rollout, make_turn

BRANCH = {"branch": {"at": "each_turn"}}


def forked(name: str, turns: int, reward: float | None, forks: dict[int, list[float | None]]) -> Rollout:
    """A rollout with forks of these rewards before these turns (None: failed)."""
    rollout = make_rollout(name, reward, [make_turn(2, observation=1 if t else 0) for t in range(turns)])
    for turn, rewards in forks.items():
        for place, one in enumerate(rewards):
            stop = RolloutStop.ENV_FAILED if one is None else RolloutStop.DONE
            own = [make_turn(2, observation=1 if t else 0) for t in range(turns - turn)]
            fork = make_rollout(name, one, own, stop=stop, fork_turn=turn, prompt=[1, 2, *[5] * turn])
            fork.id = f"{name}.t{turn + 1}.{place + 1}"
            rollout.forks.append(fork)
    return rollout


def advantages(group: Group, **algorithm: object) -> dict[str, list[float]]:
    """Of each trained row, the advantage of each turn."""
    config = make_config(rollout=BRANCH, algorithm={"normalize": "none", **algorithm}, data={"zero_variance": "drop"})
    rows = build_batch([group], config).sequences
    found = {}
    for row in rows:
        sampled = [one for one, is_sampled in zip(row.advantages, row.mask, strict=True) if is_sampled]
        assert sampled[::2] == sampled[1::2]
        found[row.rollout] = sampled[::2]
    return found


def test_every_turn_has_what_its_state_gained():
    group = group_of("g", [forked("g-0", 4, 1.0, {1: [0.0], 3: [0.0, 0.2]}), forked("g-1", 2, 0.0, {})])
    late = (1.0 + 0.0 + 0.2) / 3
    early = (late + 0.0) / 2
    assert advantages(group) == {
        "g-0": pytest.approx([early / 2, late - early, late - early, 1.0 - late]),
        "g-0.t2.1": pytest.approx([0.0 - early] * 3),
        "g-0.t4.1": pytest.approx([0.0 - late]),
        "g-0.t4.2": pytest.approx([0.2 - late]),
        "g-1": pytest.approx([-early / 2] * 2),
    }


def reference(rollout: Rollout) -> tuple[float, list[float]]:
    """The value before the first fork, and each turn's gain, by the definition: the value of a state is the mean of
    what follows, whether it is a reward or the value of a later state."""
    points = sorted({fork.fork_turn for fork in rollout.forks})

    def value(points: list[int]) -> float:
        assert rollout.reward is not None
        if not points:
            return rollout.reward
        here = [fork.reward or 0.0 for fork in rollout.forks if fork.fork_turn == points[0]]
        return fmean([value(points[1:]), *here])

    gains = []
    for turn in range(len(rollout.turns)):
        before = [p for p in points if p <= turn]
        after = [p for p in points if p > turn]
        gains.append(value(after) - (value(points[len(before) - 1 :]) if before else 0.0))
    return value(points), gains


def test_trees_agree_with_the_definition():
    draw = random.Random(3)
    for case in range(40):
        forks = {t: [draw.random() for _ in range(draw.randint(1, 3))] for t in range(1, 6) if draw.random() < 0.5}
        rollout = forked(f"g-{case}", 6, draw.random(), forks)  # pyright: ignore[reportArgumentType]
        rewards = {one.id: one.reward or 0.0 for one in rollout.tree}
        found = credit_tree([rollout], rewards, AlgorithmConfig())
        value, gains = reference(rollout)
        assert found.values[rollout.id] == pytest.approx(value, abs=1e-6)
        first = min(forks, default=6)
        own = found.by_row[rollout.id]
        assert own[:first] == [None] * first
        assert own[first:] == pytest.approx(gains[first:], abs=1e-6)


def test_the_ways_from_a_state_are_compared_by_the_estimator():
    group = group_of("g", [forked("g-0", 2, 1.0, {1: [0.0, 0.0]}), forked("g-1", 2, 0.0, {})])
    assert advantages(group, advantage="leave_one_out")["g-0"] == pytest.approx([1 / 3, 1.0])
    spread = (2 / 9) ** 0.5
    assert advantages(group, advantage="grpo")["g-0"] == pytest.approx([1.0, (2 / 3) / spread], abs=1e-4)


def test_forks_alone_make_a_group_teach():
    group = group_of("g", [forked("g-0", 2, 1.0, {1: [0.0]}), forked("g-1", 1, 0.5, {})])
    config = make_config(rollout=BRANCH)
    assert not is_zero_variance(group, config)
    assert advantages(group) == {"g-0": [0.0, 0.5], "g-0.t2.1": [-0.5], "g-1": [0.0]}


def test_forks_that_failed_are_in_no_mean_and_those_that_say_nothing_are_dropped():
    tree = forked("g-0", 3, 1.0, {1: [None, 0.0], 2: [1.0]})
    group = group_of("g", [tree, forked("g-1", 1, 0.0, {})])
    assert sorted(advantages(group)) == ["g-0", "g-0.t2.2", "g-1"]
    batch = build_batch([group], make_config(rollout=BRANCH))
    assert batch.dropped == {DropReason.FAILED: 1, DropReason.ZERO_VARIANCE: 1}
    assert len(scorable_rows([group], make_config(rollout=BRANCH))) == 4


def test_a_rollout_that_failed_takes_its_forks_with_it():
    group = group_of("g", [forked("g-0", 2, None, {1: [1.0]}), forked("g-1", 1, 0.0, {}), forked("g-2", 1, 1.0, {})])
    group.rollouts[0].stop = RolloutStop.ENV_FAILED
    assert sorted(advantages(group)) == ["g-1", "g-2"]


def test_the_price_of_turns_counts_those_before_a_fork():
    config = make_config(penalty={"turn": 0.1}).penalty
    tree = forked("g-0", 4, 1.0, {2: [1.0]})
    assert shaped_reward(tree.forks[0], config, 100) == shaped_reward(tree, config, 100) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollouts": "episodes"}, "played in this process"),
        ({"algorithm": {"advantage": "reinforce++"}}, "compares whole steps"),
        ({"algorithm": {"turns": {"compare": "turn"}}}, "use one"),
        ({"algorithm": {"shuffle_rewards": True}}, "would reveal them"),
    ],
)
def test_settings_that_do_not_go_with_forks_are_refused(settings: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        make_config(rollout=BRANCH, **settings)
