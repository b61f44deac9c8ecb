"""Records that recognise repeated calls: claims by their ids, in memory; and, also on disk, tombstones of
committed or deleted episodes and groups.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

from palestra.episodes.limits import EpisodeLimits
from palestra.episodes.outbox import Outbox
from palestra.episodes.records import BoardEpisode
from palestra.types.episode_rows import Tombstone

ClaimKey = tuple[str, str, str]
"""Owner, client id, claim id."""


class ClaimHistory:
    def __init__(self, limits: EpisodeLimits) -> None:
        self._limits = limits
        self._open: dict[ClaimKey, dict[str, BoardEpisode]] = {}
        self._over: OrderedDict[ClaimKey, None] = OrderedDict()
        """Claims without an open lease, the oldest first."""
        self._lease_counts: dict[tuple[str, str], int] = {}

    def lease_count(self, owner: str, client_id: str) -> int:
        return self._lease_counts.get((owner, client_id), 0)

    def leases_of(self, key: ClaimKey) -> list[BoardEpisode]:
        """Returns the leases of a claim that are still open."""
        return list(self._open.get(key, {}).values())

    def is_over(self, key: ClaimKey) -> bool:
        return key in self._over

    def add(self, episode: BoardEpisode) -> None:
        key = _key(episode)
        self._open.setdefault(key, {})[episode.episode_id] = episode
        self._lease_counts[key[:2]] = self._lease_counts.get(key[:2], 0) + 1

    def remove(self, episode: BoardEpisode) -> None:
        key = _key(episode)
        leases = self._open[key]
        del leases[episode.episode_id]
        if not leases:
            del self._open[key]
            self._over[key] = None
            if len(self._over) > self._limits.max_claims_remembered:
                self._over.popitem(last=False)
        if left := self._lease_counts.pop(key[:2]) - 1:
            self._lease_counts[key[:2]] = left


def _key(episode: BoardEpisode) -> ClaimKey:
    return episode.run.owner, episode.client_id, episode.claim_id


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
