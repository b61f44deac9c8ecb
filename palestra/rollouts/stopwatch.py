"""The time of a rollout: only its own work counts, so that a slow one does not time out the others of its batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class RolloutOutOfTime(Exception):
    """The rollout's time is used up; the message names the setting."""


class RolloutStopwatch:
    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.spent_s = 0.0

    @property
    def left_s(self) -> float:
        return self._limit_s - self.spent_s

    async def run(self, work: Awaitable[T]) -> T:
        """Awaits `work` within the time that is left; raises RolloutOutOfTime. A TimeoutError raised by the work itself
        passes."""
        began_s = time.perf_counter()
        limit = asyncio.timeout(self.left_s)
        try:
            async with limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            raise self.over() from None
        finally:
            self.spent_s += time.perf_counter() - began_s

    def over(self) -> RolloutOutOfTime:
        return RolloutOutOfTime(f"it did not end within {self._limit_s:g} s (rollout.timeout_s)")
