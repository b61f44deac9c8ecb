"""Plays rollouts in this process: many at once, gathered into groups, and each at its own speed from the first message
of its environment to its record. `token_turns` samples its turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import msgspec

from palestra.environments.session import EnvSession
from palestra.environments.snapshots import NotCopyable
from palestra.rollouts.gym.player import GymPlayer
from palestra.rollouts.local.first_turns import FirstTurns, FirstTurnsOfGroups
from palestra.rollouts.local.following_limit import FollowingLimit
from palestra.rollouts.local.forks import ForkState, ForkStates, fork_records
from palestra.rollouts.local.slots import RolloutSlots
from palestra.rollouts.local.token_turns import PlayerContext, TokenTurnSampler
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.rollouts.rollout_loop import (
    ForkStart,
    LimitsUsed,
    PlayedRollout,
    TurnTaking,
    Watcher,
    play,
)
from palestra.rollouts.seeds import more_seeds
from palestra.rollouts.sources import blank_rollout
from palestra.types.rollouts import Group, GroupRequest, Rollout, Task

PlayOne = Callable[[GroupRequest, int], Coroutine[Any, Any, Rollout]]


class LocalRollouts:
    """Plays rollouts concurrently. `play` may be called again while it runs: `concurrency` is the limit for all
    together."""

    def __init__(
        self,
        context: PlayerContext,
        gyms: Mapping[str, GymPlayer] | None = None,
        following: FollowingLimit | None = None,
    ) -> None:
        """`gyms` are the players of environments that gym servers play, by the environment's name. `following` says how
        many rollouts are played at once; without it, the settings do."""
        self._context = context
        self._gyms = gyms or {}
        self._concurrent = ConcurrentRollouts()
        self._following = following
        self._slots = RolloutSlots(context.settings.most_at_once) if following is None else following.slots

    def play(self, requests: Sequence[GroupRequest], sampler: PolicySampler) -> AsyncIterator[Group]:
        requests = [self._oversampled(request) for request in requests]
        first_turns = FirstTurnsOfGroups(requests, sampler)
        if self._following is not None:
            self._following.begin()

        async def play_one(request: GroupRequest, index: int) -> Rollout:
            gym = self._gyms.get(request.task.environment)
            forking = ForkStates(self._context.settings.branch) if self._context.settings.branch.is_on else None
            async with self._slots:
                if gym is None:
                    own = first_turns.of(request)
                    rollout = await play_rollout(self._context, request, index, sampler, own, forking=forking)
                else:
                    rollout = await gym.play(request, index, sampler, self._context.settings)
                    rollout.not_forked = "it is played by servers of a gym" if forking else ""
            if self._following is not None and rollout.turns:
                self._following.note_length(rollout.context_length)
            if forking is not None and gym is None:
                await self._fork(request, rollout, forking, sampler)
            return rollout

        return self._concurrent.play(requests, play_one, self._context.settings.oversample)

    def _oversampled(self, request: GroupRequest) -> GroupRequest:
        seeds = more_seeds(request.seeds, self._context.settings.oversample)
        return msgspec.structs.replace(request, seeds=seeds)

    async def _fork(self, request: GroupRequest, rollout: Rollout, states: ForkStates, sampler: PolicySampler) -> None:
        """Plays the forks of a rollout that has ended. Each is a rollout for `concurrency`."""
        width = self._context.settings.branch.width

        async def play_one(fork: Rollout, state: ForkState, place: int, first_turns: FirstTurns) -> Rollout:
            async with self._slots:
                return await play_fork(self._context, request.task, fork, state, place, first_turns)

        forks = []
        for state in states.choose(rollout):
            first_turns = FirstTurns(sampler, range(width))
            for place, fork in enumerate(fork_records(rollout, state, width)):
                forks.append((fork.id, play_one(fork, state, place, first_turns)))
        rollout.forks = await self._concurrent.together(forks)

    async def close(self) -> None:
        await self._concurrent.close()
        if self._following is not None:
            await self._following.close()


class ConcurrentRollouts:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def play(
        self, requests: Sequence[GroupRequest], play_one: PlayOne, extra: int = 0
    ) -> AsyncGenerator[Group, None]:
        """Yields groups when they are complete, with `extra` rollouts less than were requested. If the caller stops
        iterating, rollouts that are still being played are cancelled."""
        tasks = [self._start(self._play_group(request, play_one, extra), request.id) for request in requests]
        try:
            for group in asyncio.as_completed(tasks):
                yield await group
        finally:
            await _end(tasks)

    async def close(self) -> None:
        await _end(list(self._tasks))

    async def _play_group(self, request: GroupRequest, play_one: PlayOne, extra: int) -> Group:
        indices = range(len(request.seeds))
        work = [(f"{request.id}-{index}", play_one(request, index)) for index in indices]
        rollouts = await self.together(work, len(work) - extra)
        return Group(id=request.id, task=request.task, step=request.step, rollouts=rollouts)

    async def together(
        self, work: Sequence[tuple[str, Coroutine[Any, Any, Rollout]]], wanted: int | None = None
    ) -> list[Rollout]:
        """Plays rollouts at once, each in a task of the name that stands before it. When as many as are wanted have not
        failed (None: all), or if one raises, the others are ended."""
        tasks = [self._start(one, name) for name, one in work]
        wanted = len(tasks) if wanted is None else wanted
        left, ended = set(tasks), list[Rollout]()
        try:
            while left and sum(not rollout.has_failed for rollout in ended) < wanted:
                _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                ended = [task.result() for task in tasks if task.done()]
        finally:
            await _end(tasks)
        chosen = sorted(ended, key=lambda rollout: rollout.has_failed)[:wanted]
        return sorted(chosen, key=lambda rollout: rollout.index)

    def _start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits until each has cleaned up. A task that cleans up already, or is being cancelled, is not
    cancelled: that would interrupt its clean-up."""
    for task in tasks:
        if not task.done() and not task.cancelling() and task not in _cleaning_up:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_cleaning_up: WeakSet[asyncio.Task[Any]] = WeakSet()


@contextmanager
def cleaning_up() -> Iterator[None]:
    """Rollouts that are ended while they are in here are waited for, not cancelled."""
    task = asyncio.current_task()
    assert task is not None
    _cleaning_up.add(task)
    try:
        yield
    finally:
        _cleaning_up.discard(task)


async def play_rollout(
    context: PlayerContext,
    request: GroupRequest,
    index: int,
    sampler: PolicySampler,
    first_turns: FirstTurns | None = None,
    turns: TurnTaking | None = None,
    forking: ForkStates | None = None,
) -> Rollout:
    """Plays a rollout. Always returns a record, whatever happens to the environment or a sample. Without `first_turns`
    it does not share its first request. `forking` keeps the states from which forks may begin."""
    first_turns = first_turns or FirstTurns(sampler, [index])
    rollout = blank_rollout(request, index, request.seeds[index])
    rollout.temperature = context.settings.temperature
    turn_sampler = TokenTurnSampler(context, request.task.name, rollout, sampler, first_turns, index)
    watcher = None if forking is None else ForkWatcher(forking, turn_sampler)
    return await _played(context, request.task, turn_sampler, turns=turns, watcher=watcher)


async def play_fork(
    context: PlayerContext, task: Task, fork: Rollout, state: ForkState, place: int, first_turns: FirstTurns
) -> Rollout:
    """Plays a fork, of which `fork` is the record so far: the rollout goes on from a state in another way. `place` is
    that among the forks from this state, which share their first request."""
    turn_sampler = TokenTurnSampler(context, task.name, fork, first_turns.sampler, first_turns, place, state)
    start = ForkStart(state.world, state.messages, state.used, state.reward)
    return await _played(context, task, turn_sampler, start=start)


async def _played(
    context: PlayerContext,
    task: Task,
    turn_sampler: TokenTurnSampler,
    *,
    turns: TurnTaking | None = None,
    watcher: Watcher | None = None,
    start: ForkStart | None = None,
) -> Rollout:
    session, rollout = context.environments.open(task), turn_sampler.rollout
    if watcher is not None and context.settings.branch.replay:
        session.note_turns()
    try:
        played = await play(session, task, turn_sampler, context.settings, turns, watcher=watcher, start=start)
        rollout.metrics, rollout.verdict = await session.metrics(), await session.verdict()
        return _recorded(rollout, played)
    finally:
        turn_sampler.leave()
        with cleaning_up():
            await session.close()


class ForkWatcher:
    """Keeps the state before each turn, as far as its world can be copied."""

    def __init__(self, states: ForkStates, turn_sampler: TokenTurnSampler) -> None:
        self._states, self._sampler = states, turn_sampler

    async def before_turn(self, used: LimitsUsed, session: EnvSession) -> None:
        if self._states.wants(used.turns):
            try:
                world = await session.snapshot()
            except NotCopyable as error:
                self._states.refusal = str(error)
                return
            self._states.keep(self._sampler.state(used, world))


def _recorded(rollout: Rollout, played: PlayedRollout) -> Rollout:
    for turn, reward, env_s in zip(rollout.turns_in_order, played.rewards, played.env_s, strict=False):
        turn.reward, turn.env_s = reward, env_s
    rollout.stop, rollout.error = played.stop, played.error
    rollout.seconds, rollout.reward = played.seconds, played.reward
    return rollout
