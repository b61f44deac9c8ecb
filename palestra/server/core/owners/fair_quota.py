"""A quota on waiting requests, which one owner cannot use up for the others."""

from __future__ import annotations

from collections import Counter


class FairQuota:
    """A quota that one owner may fill. When it is full, owners with less than an equal share are still admitted: nobody
    is shut out by another, and n owners have at most limit * (1 + 1/2 + … + 1/n) waiting, which grows slowly."""

    def __init__(self, limit: int):
        self._limit, self._total = limit, 0
        self._used: Counter[str] = Counter()

    def admits(self, owner: str) -> bool:
        if self._total < self._limit:
            return True
        return self._used[owner] * len(self._used.keys() | {owner}) < self._limit

    def used(self, owner: str) -> int:
        return self._used[owner]

    def acquire(self, owner: str, size: int = 1) -> None:
        self._change(owner, size)

    def release(self, owner: str, size: int = 1) -> None:
        self._change(owner, -size)

    def _change(self, owner: str, by: int) -> None:
        self._total += by
        self._used[owner] += by
        if not self._used[owner]:
            del self._used[owner]
