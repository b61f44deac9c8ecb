"""Finished samples of one client in the order they finished, for clients that ask for many at once.

Owns: the order, the cursor, the waiting. Never touches: results.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

AT_ONCE = 256
"""Completions in one answer: the client then reads as many results, each by a request of its own."""


def _beginning() -> int:
    """Greater than every cursor that was given before, also by a server that was restarted: a client with an old cursor
    gets all that is here."""
    return time.time_ns() // 1000


@dataclass(slots=True, eq=False)
class Completions:
    request_ids: list[str] = field(default_factory=list)
    first: int = field(default_factory=_beginning)
    """Cursor before the oldest one kept."""
    asked_at: float = field(default_factory=time.monotonic)
    """When the client asked last."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, request_ids: Iterable[str]) -> None:
        self.request_ids += request_ids
        self.wake()

    def wake(self) -> None:
        """Wakes all who wait; also called when the server is about to stop."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self, cursor: int, timeout_s: float) -> None:
        """Waits until there is something after the cursor, until it is woken, or until the timeout."""
        if not self.has_after(cursor):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()

    def has_after(self, cursor: int) -> bool:
        return len(self.request_ids) > max(0, cursor - self.first)

    def after(self, cursor: int) -> tuple[list[str], int]:
        """Returns the next completions after a cursor, and the cursor after these."""
        start = max(0, cursor - self.first)
        found = self.request_ids[start : start + AT_ONCE]
        return found, self.first + start + len(found)

    def forget(self, cursor: int) -> None:
        n = min(max(0, cursor - self.first), len(self.request_ids))
        del self.request_ids[:n]
        self.first += n
