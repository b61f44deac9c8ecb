"""Tombstones of committed or deleted episodes and groups, by which repeated requests are recognised.

Owns: how long and how many are kept. Never touches: live episodes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

from palestra.episodes.limits import EpisodeLimits
from palestra.episodes.outbox import Outbox
from palestra.types.episode_rows import Tombstone


class Tombstones:
    def __init__(self, limits: EpisodeLimits, outbox: Outbox) -> None:
        self._limits, self._outbox = limits, outbox
        self._stones: OrderedDict[str, Tombstone] = OrderedDict()
        """Tombstones, the oldest first."""
        self.earliest = math.inf
        """Nothing has to be forgotten before this time."""

    def restore(self, stones: Iterable[Tombstone]) -> None:
        for stone in sorted(stones, key=lambda stone: (stone.until, stone.name)):
            self._stones[stone.name] = stone
            self.earliest = min(self.earliest, stone.until)
        if len(self._stones) > self._limits.max_remembered:
            self.earliest = -math.inf

    def put(self, name: str, owner: str, attempt: int, digest: bytes, now: float) -> None:
        self._stones.pop(name, None)
        until = now + self._limits.remember_s
        stone = Tombstone(name=name, owner=owner, attempt=attempt, digest=digest, until=until)
        self._stones[name] = stone
        self._outbox.tombstone(name, stone)
        self.earliest = now if len(self._stones) > self._limits.max_remembered else min(self.earliest, until)

    def put_cancelled(self, name: str, owner: str, attempt: int, now: float) -> None:
        """Remembers an attempt that was being played when its run was deleted; it has no result."""
        self.put(name, owner, attempt, b"", now)

    def find(self, name: str, owner: str) -> Tombstone | None:
        stone = self._stones.get(name)
        return stone if stone is not None and stone.owner == owner else None

    def purge(self, now: float) -> None:
        while self._stones:
            name, stone = next(iter(self._stones.items()))
            if stone.until > now and len(self._stones) <= self._limits.max_remembered:
                self.earliest = stone.until
                return
            self._stones.popitem(last=False)
            self._outbox.tombstone(name, None)
        self.earliest = math.inf
