"""Backpressure: while an engine has too many model calls waiting, nothing new is claimed for it.

Calls wait if all rows of the engine's batch are taken, or its cache has no room for another. Leased episodes continue,
so waiting calls are answered in the end, and claims are served again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import structlog

log = structlog.get_logger()

FRESH_S = 0.1  # there may be thousands of claims in a second
LOOK_S = 0.25  # while an engine is full; engines report once a second, or less often
UNKNOWN = ""  # name for a run whose engine is not known yet


class Backpressure:
    def __init__(self, most: int | None, calls_waiting: Callable[[], Mapping[str, int]]):
        """`most` is the number of calls that may wait; None: any number. `calls_waiting` returns how many wait, by the
        base model's name."""
        self._most, self._calls_waiting = most, calls_waiting
        self._full: dict[str, str] = {}
        self._looked_at = float("-inf")
        self._blocked: set[str] = set()
        """Engines that were found full, and not found with room since."""
        self._holds = asyncio.Event()

    def full(self) -> Mapping[str, str]:
        """Returns the full engines by the base model's name, with the reason."""
        now = time.monotonic()
        if self._most is not None and now - self._looked_at >= FRESH_S:
            self._looked_at, self._full = now, self._look(self._most)
            if self._full:
                self._blocked |= self._full.keys()
                self._holds.set()
        return self._full

    async def watch(self, on_capacity: Callable[[], None]) -> None:
        """Runs for ever; calls `on_capacity` when an engine that was full is not full any more."""
        while True:
            await self._holds.wait()
            self._holds.clear()
            while self._blocked:
                await asyncio.sleep(LOOK_S)
                try:
                    if freed := self._blocked - self.full().keys():
                        self._blocked -= freed
                        on_capacity()
                except Exception:
                    log.exception("waiting claims could not be checked; trying again")

    def _look(self, most: int) -> dict[str, str]:
        waiting = self._calls_waiting()
        full = {
            name: f"{count} model calls wait for {name}, more than {most} (episodes.max_calls_waiting); "
            "claim again soon"
            for name, count in waiting.items()
            if count > most
        }
        if full and len(full) == len(waiting):
            full[UNKNOWN] = next(iter(full.values()))
        return full
