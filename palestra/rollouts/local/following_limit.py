"""The number of rollouts at once where the config gives none: as many as the server's engine can hold.

Each second the engine's load is read. While every rollout that is sampled has a row and pages are free, more rollouts
begin; while samples wait for a row or for pages, fewer do, so that those that run keep their prefixes in the cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from palestra.rollouts.local.slots import RolloutSlots

FIRST, LEAST, MOST = 64, 8, 8192
LOOK_S = 1.0  # the engine reports as often
LOOKS = 2  # in a row before the limit falls: weights that change let all rows wait for a moment
FULL = 0.95  # of the pages: a row that grows would soon take those of another
HALF_FULL = 0.5
FAST, SLOW = 2.0, 1.25
"""By what the limit grows while less, and while more than half of the pages are used."""
HELD_TWICE = 2.0
"""Rollouts in flight are half as long as they will be, and those of a group share their prompt."""
MEMORY = 0.95  # of the mean length: that of about twenty rollouts


class SamplingLoad(msgspec.Struct, frozen=True):
    """What the engine that samples is doing."""

    waiting: int
    """Samples that wait for a row of the batch."""
    kv_used: float
    """Share of the cache's pages that running sequences hold."""
    cache_tokens: int
    """Tokens that the cache can hold; 0: not known."""


ReadLoad = Callable[[], Awaitable[SamplingLoad | None]]
"""Returns None if nothing is known just now."""


class FollowingLimit:
    def __init__(self, read: ReadLoad) -> None:
        self.slots = RolloutSlots(FIRST)
        self._read = read
        self._full_looks = 0
        self._mean_tokens = 0.0
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Follows from now on, until `close`."""
        self._task = self._task or asyncio.create_task(self._follow(), name="concurrency")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def note_length(self, tokens: int) -> None:
        """Learns from the length of a rollout that has ended."""
        share = MEMORY if self._mean_tokens else 0.0
        self._mean_tokens = share * self._mean_tokens + (1 - share) * tokens

    def take_metrics(self) -> dict[str, float]:
        return {"rollouts/concurrency": float(self.slots.limit)}

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if (load := await self._read()) is not None:
                self.slots.resize(self.next_limit(load))

    def next_limit(self, load: SamplingLoad) -> int:
        """Returns the limit after a look at the engine."""
        slots = self.slots
        limit = slots.limit
        self._full_looks = self._full_looks + 1 if load.waiting else 0
        if self._full_looks >= LOOKS:
            limit = min(limit, slots.taken - load.waiting)  # rollouts keep their places, and wait at the next look too
        elif not load.waiting and load.kv_used < FULL and slots.wanted > limit:
            limit = int(limit * (FAST if load.kv_used < HALF_FULL else SLOW)) + 1
        return max(LEAST, min(limit, self._most(load)))

    def _most(self, load: SamplingLoad) -> int:
        """Rollouts between two turns hold no pages, but soon need again what they have in the cache."""
        if not load.cache_tokens or not self._mean_tokens:
            return MOST
        return min(MOST, int(HELD_TWICE * load.cache_tokens / self._mean_tokens))
