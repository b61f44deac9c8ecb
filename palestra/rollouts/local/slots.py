"""Places for rollouts that are played at once: a fixed number, or as many as the server can hold."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from types import TracebackType


class RolloutSlots:
    """A semaphore whose limit may change. Rollouts that have a place keep it when the limit falls."""

    def __init__(self, limit: int) -> None:
        self.limit, self.taken = limit, 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def wanted(self) -> int:
        """Number of rollouts that have a place or wait for one."""
        return self.taken + len(self._waiting)

    def resize(self, limit: int) -> None:
        self.limit = limit
        self._admit()

    async def __aenter__(self) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._admit()
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                with suppress(ValueError):
                    self._waiting.remove(place)
            else:  # it was given a place at the same moment
                self._leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self.taken -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0].done() or self.taken < self.limit):
            place = self._waiting.popleft()
            if not place.done():
                self.taken += 1
                place.set_result(None)
