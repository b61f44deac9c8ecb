"""A step of a synchronous run: which groups are played for it, and how many rounds that takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.environments.task_order import TaskOrder
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.rollouts.sources import blank_rollout
from palestra.runs.listener import Silence
from palestra.training.batches.compared_rewards import is_zero_variance
from palestra.training.batches.grpo_batch import trainable_rows
from palestra.training.collecting.sync_collector import Collector, RequestMaker
from palestra.types.rollouts import Group, GroupRequest, RolloutStop, Task
from tests.properties import examples
from tests.training.records import make_config, make_turn
from tests.training.scripted import ScriptedSampler


class Rounds:
    """A source whose group at a position teaches something or does not."""

    def __init__(self, informative: Sequence[bool]) -> None:
        self._informative, self.rounds = informative, list[int]()

    async def play(self, requests: Sequence[GroupRequest], sampler: PolicySampler) -> AsyncIterator[Group]:
        self.rounds.append(len(requests))
        for request in reversed(requests):
            rollouts = [blank_rollout(request, index, seed) for index, seed in enumerate(request.seeds)]
            for rollout in rollouts:
                rollout.prompt, rollout.turns, rollout.stop = [1, 2], [make_turn()], RolloutStop.DONE
                differs = self._informative[request.position % len(self._informative)]
                rollout.reward = float(differs and rollout.index)
            yield Group(id=request.id, task=request.task, step=request.step, rollouts=rollouts)

    async def close(self) -> None: ...


def collected(informative, groups, **data):
    config = make_config(rollout={"group_size": 2, "groups_per_step": groups}, data=data)
    order = TaskOrder([(1.0, [Task(id=str(n), environment="e", prompt=[]) for n in range(200)])], 0)
    source = Rounds(informative)
    collector = Collector(config, source, RequestMaker(order, 0, 2, 0, [], None), Silence())
    return asyncio.run(collector.collect(0, ScriptedSampler("x"))), source.rounds


@pytest.mark.parametrize(("ahead", "rounds"), [(False, [8, 4, 2]), (True, [8, 8])])
def test_a_refill_may_play_as_many_as_will_probably_bring_what_is_missing(ahead: bool, rounds: list[int]) -> None:
    half = [True, False]
    groups, played = collected(half, 8, refill_ahead=ahead)
    assert played == rounds
    assert [group.id for group in groups] == sorted(group.id for group in groups)
    assert sum(group.rollouts[0].reward != group.rollouts[1].reward for group in groups) == (8 if ahead else 7)


def test_a_share_seen_in_all_rounds_so_far_decides_and_a_surplus_is_trained_in_the_step() -> None:
    """After one of six a whole round follows; after five of twelve, three are played for the one that is missing."""
    groups, played = collected([True, *[False] * 5, *[True, False] * 2, *[True] * 20], 6, refill_ahead=True)
    assert played == [6, 6, 3]
    taught = [group for group in groups if group.rollouts[0].reward != group.rollouts[1].reward]
    assert len(taught) == 8 > 6
    config = make_config(rollout={"group_size": 2, "groups_per_step": 6})
    trained = {row.id.rpartition("-")[0] for row in trainable_rows(groups, config)}
    assert trained == {group.id for group in taught}


@examples(50)
@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 9), st.integers(0, 3), st.booleans())
def test_no_round_is_larger_than_a_step_and_none_is_played_in_vain(
    informative: list[bool], count: int, refills: int, ahead: bool
) -> None:
    groups, rounds = collected(informative, count, max_refills=refills, refill_ahead=ahead)
    assert rounds[0] == count
    assert len(rounds) <= 1 + refills
    assert max(rounds) <= count
    assert sum(rounds) == len(groups) == len({group.id for group in groups})
    config = make_config(rollout={"group_size": 2, "groups_per_step": count})
    taught = [not is_zero_variance(group, config) for group in groups]
    assert sum(taught[: sum(rounds[:-1])]) < count, "the last round was not needed"
    assert sum(taught) >= count or len(rounds) == 1 + refills
