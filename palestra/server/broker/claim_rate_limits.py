"""Rate limits: each client may send a second's worth of calls at once, and afterwards at the allowed rate."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

MAX_KNOWN = 10_000  # clients; the least recent ones are forgotten, and start again


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float


class RateLimiter:
    def __init__(self, per_s: float | None):
        """`per_s`: None: no limit."""
        self._per_s = per_s
        self._buckets: OrderedDict[Hashable, _Bucket] = OrderedDict()

    def wait_s(self, who: Hashable, now: float) -> float:
        """Returns 0 and counts the call; or after how many seconds the client may call again."""
        if self._per_s is None:
            return 0.0
        most = max(1.0, self._per_s)
        bucket = self._buckets.pop(who, None) or _Bucket(most, now)
        self._buckets[who] = bucket
        if len(self._buckets) > MAX_KNOWN:
            self._buckets.popitem(last=False)
        bucket.left = min(most, bucket.left + max(now - bucket.at, 0.0) * self._per_s)
        bucket.at = now
        if bucket.left < 1.0:
            return (1.0 - bucket.left) / self._per_s
        bucket.left -= 1.0
        return 0.0
