"""Collects groups for an asynchronous run: they are played all the time, on weights of bounded staleness."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

from msgspec import Struct

from palestra.config.train import GrpoConfig
from palestra.rollouts.following_sampler import FollowingSampler
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.rollouts.sources import RolloutSource, lost_rollouts
from palestra.runs.listener import RunListener, Stage
from palestra.training.batches.compared_rewards import is_zero_variance
from palestra.training.collecting.sync_collector import RequestMaker, raise_if_all_failed
from palestra.types.rollouts import Group, GroupRequest, RolloutStop

GoOn = Callable[[PolicySampler], Awaitable[None]]

HOPELESS = 4
"""The run ends after this many steps' worth of groups in a row without one graded rollout."""


class StartedGroup(Struct):
    request: GroupRequest
    position: int
    version: int
    """Version of the weights that it is played on; where it continued, of the newest that drew some of it."""
    group: Group | None = None


class StreamingCollector:
    """Collects in the background; use as `async with`: groups are played between the calls of `collect`, too.

    With s = max_staleness and G groups per step, (s + 1) * G groups are in flight or ready. A step waits for groups
    that would be too old for the next step, so that slow groups are used as well as fast ones. Where rollouts continue
    with new weights it waits for none: a group that was begun more than s versions ago makes room for another.
    """

    def __init__(
        self,
        config: GrpoConfig,
        source: RolloutSource,
        requests: RequestMaker,
        listener: RunListener,
        go_on: GoOn | None = None,
    ) -> None:
        """`go_on`, where rollouts continue with new weights: lets what is under way go on with a sampler's."""
        self._config, self._source, self._requests, self._listener = config, source, requests, listener
        self._go_on = go_on
        self._begun: dict[int, StartedGroup] = {}
        """Groups that were begun, by position."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sampler: PolicySampler | None = None
        """Whose weights are the newest."""
        self._following: FollowingSampler | None = None
        """The same for rollouts that continue."""
        self._changed = asyncio.Event()
        self._barren: list[Group] = []
        self._failure: BaseException | None = None

    @property
    def pending(self) -> list[int]:
        """Positions of tasks whose groups are not used yet: a resumed run begins with them."""
        return [*sorted(self._begun), *self._requests.pending]

    async def __aenter__(self) -> StreamingCollector:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def collect(self, step: int, sampler: PolicySampler) -> list[Group]:
        """Returns groups for a step, and in addition those that failed since the last step."""
        await self._use(sampler)
        groups_needed = self._config.rollout.groups_per_step
        refills = self._config.data.max_refills if self._config.data.zero_variance == "refill" else 0
        aside: list[Group] = []
        barren = 0
        while True:
            for group, is_stale in self._leave_aside():
                aside.append(group)
                barren += not is_stale
            ready = [begun for _, begun in sorted(self._begun.items()) if begun.group is not None]
            self._listener.stage(Stage.COLLECT, min(len(ready), groups_needed), groups_needed)
            if self._failure is not None:
                raise self._failure
            has_enough = len(ready) >= groups_needed or len(ready) + barren >= groups_needed * (1 + refills)
            if has_enough and not self._must_wait():
                return aside + self._take(ready[:groups_needed], step)
            self._fill()
            self._changed.clear()
            await self._changed.wait()

    async def _use(self, sampler: PolicySampler) -> None:
        """Takes over new weights: groups that begin from now on are played on them."""
        self._sampler = sampler
        if self._go_on is not None:
            await self._continue_with(sampler, self._go_on)
        if self._config.asynchronous.in_flight == "drop":
            limit = self._config.asynchronous.max_staleness
            for begun in self._begun.values():
                task = self._tasks.get(begun.position)
                if task is not None and self._age(begun) > limit:
                    task.cancel()
        self._fill()

    async def _continue_with(self, sampler: PolicySampler, go_on: GoOn) -> None:
        if self._following is None:
            self._following = FollowingSampler(sampler)
        elif self._following.newest is not sampler:
            self._following.newest = sampler
            await go_on(sampler)

    def _must_wait(self) -> bool:
        """Whether the step must wait for groups that the next step could not use any more, unless the config says to
        drop these, or to continue them."""
        if self._config.asynchronous.in_flight != "finish":
            return False
        limit = self._config.asynchronous.max_staleness
        return any(begun.group is None and self._age(begun) >= limit for begun in self._begun.values())

    def _take(self, ready: list[StartedGroup], step: int) -> list[Group]:
        for begun in ready:
            del self._begun[begun.position]
        if ready:
            self._barren.clear()
        groups = [begun.group for begun in ready if begun.group is not None]
        for group in groups:
            group.step = step
        return groups

    def _leave_aside(self) -> list[tuple[Group, bool]]:
        """Removes finished groups that have nothing to learn, or are too old (True), to make room for others."""
        aside: list[tuple[Group, bool]] = []
        for position, begun in sorted(self._begun.items()):
            if begun.group is None:
                continue
            is_stale = self._age(begun) > self._config.asynchronous.max_staleness
            if is_stale:
                for rollout in begun.group.all_rollouts:
                    rollout.stop = RolloutStop.STALE
            elif self._config.data.zero_variance == "keep" or not is_zero_variance(begun.group, self._config):
                continue
            aside.append((begun.group, is_stale))
            del self._begun[position]
        self._barren += [group for group, _ in aside]
        if len(self._barren) >= HOPELESS * self._config.rollout.groups_per_step:
            raise_if_all_failed(self._barren, self._config)
        return aside

    def _age(self, begun: StartedGroup) -> int:
        return self._sampler.version - begun.version if self._sampler else 0

    def _fill(self) -> None:
        if (sampler := self._sampler) is None:
            return
        limit = self._config.asynchronous.max_staleness
        room = (limit + 1) * self._config.rollout.groups_per_step
        if self._following is not None:
            room += sum(begun.group is None and self._age(begun) > limit for begun in self._begun.values())
        while len(self._begun) < room:
            request = self._requests.next(sampler.version)
            self._begun[request.position] = begun = StartedGroup(request, request.position, sampler.version)
            task = asyncio.create_task(self._play(begun, self._following or sampler), name=request.id)
            self._tasks[request.position] = task
            task.add_done_callback(lambda _, position=request.position: self._tasks.pop(position, None))

    async def _play(self, begun: StartedGroup, sampler: PolicySampler) -> None:
        try:
            async for group in self._source.play([begun.request], sampler):
                played = [rollout for rollout in group.rollouts if rollout.turns]
                if self._following is not None:  # what is too old in it is left out token by token
                    begun.version = max([begun.version, *(rollout.newest_version for rollout in played)])
                else:  # it may have been played before a resume
                    begun.version = min([begun.version, *(rollout.oldest_version for rollout in played)])
                begun.group = group
        except asyncio.CancelledError:
            begun.group = stale_group(begun.request)
        except BaseException as error:
            self._failure = error
        self._changed.set()


def stale_group(request: GroupRequest) -> Group:
    """Returns the record of a group that was dropped while it was played."""
    rollouts = lost_rollouts(request, RolloutStop.STALE, "dropped: new weights made it too old")
    return Group(id=request.id, task=request.task, step=request.step, rollouts=rollouts)
