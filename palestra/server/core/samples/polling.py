"""Completions for clients that ask for many samples at once and name none of those that they wait for.

`Completions` has a client's finished samples in the order in which they finished, with a cursor. `NumberBlock` is in
the database: samples are in memory only, so a restarted server has to know by itself which of them may have been lost:
at most those with the numbers of the block.
Owns: the order, the cursor, the waiting, the blocks. Never touches: samples and their results.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from palestra.store import Store
from palestra.store.queries.settings import put_setting, settings_under

AT_ONCE = 256
"""Completions in one answer: the client then reads as many results, each by a request of its own."""


@dataclass(slots=True, eq=False)
class Completions:
    request_ids: list[str] = field(default_factory=list)
    first: int = field(default_factory=lambda: time.time_ns() // 1000)
    """Cursor before the oldest one kept. It begins greater than every cursor that was given before, also by a server
    that was restarted: a client with an old cursor gets all that is here."""
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


SETTING = "sample_numbers:"
CLONE_STRIDE = 1_000_000_000  # the sample numbers of a clone start at a multiple of it
BLOCK = 1024
"""Numbers that are written ahead. The first block of each clone is never written: most clients need no other."""
MAX_LOST = 1 << 18  # numbers that a client may leave out are its own choice


@dataclass(slots=True, eq=False)
class NumberBlock:
    """The numbers of samples that one clone may be waiting for."""

    low: int
    high: int
    is_stored: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a later block is written: all who need it wait for one write."""

    @classmethod
    def first_of(cls, clone: int) -> NumberBlock:
        return cls(clone * CLONE_STRIDE, clone * CLONE_STRIDE + BLOCK)

    @property
    def numbers(self) -> range:
        return range(max(self.low, self.high - MAX_LOST), self.high)

    def has(self, number: int) -> bool:
        return self.low <= number < self.high

    async def reserve(self, number: int, store: Store, name: str, unread: Callable[[], Iterable[int]]) -> None:
        """Returns when the block that is stored has this number. `unread`: numbers of samples whose results the client
        may still want. Smaller numbers may be on their way over other connections, so it begins well before."""
        async with self.lock:
            if not self.has(number):
                first = number - number % CLONE_STRIDE
                low = max(first, min([number, *unread()]) - BLOCK)
                high = max(self.high, number + BLOCK)
                await store.write(lambda c: put_setting(c, name, f"{low} {high}"))
                self.low, self.high, self.is_stored = low, high, True


def block_name(sampler_id: str, clone: int) -> str:
    return f"{SETTING}{sampler_id}:{clone}"


async def stored_blocks(store: Store) -> dict[str, dict[int, NumberBlock]]:
    """Returns the blocks that were written, by sampler and clone."""
    found: dict[str, dict[int, NumberBlock]] = {}
    for name, value in (await store.read(lambda c: settings_under(c, SETTING))).items():
        sampler_id, _, clone = name.removeprefix(SETTING).rpartition(":")
        low, _, high = value.partition(" ")
        found.setdefault(sampler_id, {})[int(clone)] = NumberBlock(int(low), int(high), is_stored=True)
    return found
