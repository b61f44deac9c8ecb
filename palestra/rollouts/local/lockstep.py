"""Rollouts in lockstep: all sample, then all step, until the last has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager

from palestra.rollouts.local.first_turns import FirstTurnsOfGroups
from palestra.rollouts.local.player import ConcurrentRollouts, PlayerContext, play_rollout
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.types.rollouts import Group, GroupRequest, Rollout


class BatchedRollouts:
    """Plays in batches. A batch is as many whole groups as `concurrency` allows at once, and at least one."""

    def __init__(self, context: PlayerContext) -> None:
        self._context = context
        self._concurrent = ConcurrentRollouts()
        self._slots = asyncio.Semaphore(context.settings.most_at_once)
        self._slots_lock = asyncio.Lock()
        """Lets only one batch at a time collect its slots: two batches that each held half of them would wait for
        ever."""

    async def play(self, requests: Sequence[GroupRequest], sampler: PolicySampler) -> AsyncIterator[Group]:
        for batch in split_batches(requests, self._context.settings.most_at_once):
            size = sum(len(request.seeds) for request in batch)
            async with self._room_for(size), aclosing(self._play_batch(batch, size, sampler)) as groups:
                async for group in groups:
                    yield group

    async def close(self) -> None:
        await self._concurrent.close()

    def _play_batch(
        self, batch: Sequence[GroupRequest], size: int, sampler: PolicySampler
    ) -> AsyncGenerator[Group, None]:
        gate = StepBarrier(size)
        first_turns = FirstTurnsOfGroups(batch, sampler)

        async def play_one(request: GroupRequest, index: int) -> Rollout:
            try:
                return await play_rollout(self._context, request, index, sampler, first_turns.of(request), gate)
            finally:
                gate.leave()

        return self._concurrent.play(batch, play_one)

    @asynccontextmanager
    async def _room_for(self, size: int) -> AsyncIterator[None]:
        active = 0
        try:
            async with self._slots_lock:
                while active < min(size, self._context.settings.most_at_once):
                    await self._slots.acquire()
                    active += 1
            yield
        finally:
            for _ in range(active):
                self._slots.release()


class StepBarrier:
    """Opens when all that still play have arrived; all continue together."""

    def __init__(self, players: int) -> None:
        self._players = players
        self._waiting = 0
        self._opens = asyncio.Event()

    async def wait(self) -> None:
        self._waiting += 1
        opens = self._opens
        self._open_if_all_are_here()
        await opens.wait()

    def leave(self) -> None:
        """Removes a player for good."""
        self._players -= 1
        self._open_if_all_are_here()

    def _open_if_all_are_here(self) -> None:
        if self._waiting and self._waiting == self._players:
            self._waiting = 0
            self._opens.set()
            self._opens = asyncio.Event()


def split_batches(requests: Sequence[GroupRequest], most: int) -> Iterator[list[GroupRequest]]:
    batch: list[GroupRequest] = []
    size = 0
    for request in requests:
        if batch and size + len(request.seeds) > most:
            yield batch
            batch, size = [], 0
        batch.append(request)
        size += len(request.seeds)
    if batch:
        yield batch
