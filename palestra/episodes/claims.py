"""Idempotent claims: which leases each claim got, and how many each client holds.

Owns: the answer to a repeated claim. Never touches: what is claimed next.
"""

from __future__ import annotations

from collections import OrderedDict

from palestra.episodes.limits import EpisodeLimits
from palestra.episodes.records import BoardEpisode

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
