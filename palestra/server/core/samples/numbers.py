"""Which numbers the samples of a client may have, kept in the database in blocks.

Samples are in memory only. A client that asks for many completions at once names none of the samples it waits for, so
a restarted server has to know by itself which samples may have been lost: at most those of the block that is kept here.

Owns: the blocks. Never touches: samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from palestra.store import Store
from palestra.store.queries.settings import put_setting, settings_under

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
