"""Groups that are played while others are trained: how many there are, and what happens when weights change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from palestra.environments.task_order import TaskOrder
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.runs.listener import Silence
from palestra.training.collecting.async_collector import StreamingCollector
from palestra.training.collecting.sync_collector import RequestMaker
from palestra.types.rollouts import Group, GroupRequest, Task
from tests.training.records import make_config, make_group, make_turn
from tests.training.scripted import ScriptedSampler

STEP, SLOW = 2, "g000000"


class Played:
    """Plays at once what is not slow, and the slow group when it may end; a group is of the weights of its end."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.begun: list[str] = []
        self.begun_before = 0
        """Number of groups before the slow one ended."""

    async def play(self, requests: Sequence[GroupRequest], sampler: PolicySampler) -> AsyncIterator[Group]:
        (request,) = requests
        self.begun.append(request.id)
        if request.id == SLOW:
            await self.may_end.wait()
        yield make_group(request.id, [1.0, 0.0], turns=[make_turn(version=sampler.version)])

    async def close(self) -> None: ...


async def steps_of(in_flight, count):
    """The groups of each step; the slow one may end after the last."""
    source, moved = Played(), []
    config = make_config(
        asynchronous={"enabled": True, "max_staleness": 1, "in_flight": in_flight},
        rollout={"groups_per_step": STEP, "group_size": 2},
    )
    requests = RequestMaker(TaskOrder([(1.0, [Task(id="t", environment="math", prompt=[])])], 0), 0, 2)

    async def go_on(sampler):
        moved.append(sampler.version)

    found = []
    follows = go_on if in_flight == "continue" else None
    async with StreamingCollector(config, source, requests, Silence(), follows) as collector:
        for version in range(count):
            if version == count - 1:
                source.begun_before = len(source.begun)
                source.may_end.set()
                await asyncio.sleep(0.01)
            groups = await asyncio.wait_for(collector.collect(version, ScriptedSampler("", version)), 5)
            found.append([group.id for group in groups])
    return found, source, moved


def test_a_slow_group_that_continues_holds_up_no_step_and_makes_room() -> None:
    found, source, moved = asyncio.run(steps_of("continue", 5))
    assert all(SLOW not in step for step in found[:4])
    assert [len(step) for step in found] == [STEP] * 5
    assert SLOW in found[4]  # what its last turns have of young weights is trained
    assert moved == [1, 2, 3, 4]
    # Three steps were taken when the fourth was begun, with two steps' worth of others and the slow one.
    assert source.begun_before == 3 * STEP + 2 * STEP + 1


def test_a_step_waits_for_a_slow_group_that_finishes() -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(steps_of("finish", 5))
