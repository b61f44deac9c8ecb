"""Lets coroutines wait for events by name."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable


class NamedEvents:
    def __init__(self) -> None:
        self._waiting: dict[Hashable, set[asyncio.Future[None]]] = {}

    async def wait(self, name: Hashable, timeout_s: float) -> bool:
        """Waits for an event; False: nothing happened within the timeout. Events before the call do not count, so check
        first."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, set()).add(future)
        try:
            return bool((await asyncio.wait({future}, timeout=timeout_s))[0])
        finally:
            same = self._waiting.get(name, set())
            same.discard(future)
            if not same:
                self._waiting.pop(name, None)

    def wake(self, name: Hashable) -> None:
        for future in self._waiting.pop(name, ()):
            future.set_result(None)

    def wake_all(self) -> None:
        for name in list(self._waiting):
            self.wake(name)
