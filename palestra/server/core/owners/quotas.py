"""Quotas: what one owner may use, whatever others do.

A limit that passes by waiting is answered with 429, which clients retry; one that does not with 403; the tokens of a
day with 402, at which Tinker's SDK pauses for an hour and tells its user why, while other clients stop.

Owns: the limits, what of a shared one is in use, how they are refused. Never touches: the tokens that were used
(`usage`), rows (`store.queries`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from palestra.server.core.errors import ApiError, Refusal
from palestra.server.core.owners.usage import UsageAccount, next_day
from palestra.server.core.telemetry.metrics import Metrics
from palestra.store import Store
from palestra.store.errors import QuotaExceeded
from palestra.store.queries.quotas import effective_quota, list_quotas, set_quota
from palestra.store.records import Quota

TOKENS_USED = 402
EXCEEDED = 403
CODE = "insufficient_quota"


class OwnerQuotas:
    def __init__(self, store: Store, usage: UsageAccount, metrics: Metrics):
        self._store, self._usage, self._metrics = store, usage, metrics
        self._stored: dict[str, Quota] = {}
        self._effective: dict[str, Quota] = {}

    async def read(self) -> None:
        """Reads the limits again: commands beside the server change them, too."""
        stored = {quota.owner: quota for quota in await self._store.read(list_quotas)}
        if stored != self._stored:
            self._stored, self._effective = stored, {}

    async def set(self, owner: str, limits: Mapping[str, int | None]) -> None:
        await self._store.write(lambda c: set_quota(c, owner, limits))
        await self.read()

    @property
    def stored(self) -> dict[str, Quota]:
        return self._stored

    def of(self, owner: str) -> Quota:
        found = self._effective.get(owner)
        if found is None:
            found = self._effective[owner] = effective_quota(self._stored, owner)
        return found

    def check_tokens(self, owner: str) -> None:
        limit = self.of(owner).tokens_per_day
        if limit is not None and (used := self._usage.tokens_today(owner)) >= limit:
            self._metrics.quota_refused(owner, "tokens_per_day")
            raise ApiError(
                TOKENS_USED,
                f"{owner!r} has used {used:,} tokens today, and its quota allows {limit:,} a day; it begins anew at "
                f"{next_day(time.time())}. To raise it: palestra quota set {owner} tokens_per_day=TOKENS",
                code=CODE,
            )

    def check_pending_samples(self, owner: str, pending: int) -> None:
        limit = self.of(owner).pending_samples
        if limit is not None and pending >= limit:
            self._metrics.quota_refused(owner, "pending_samples")
            raise Refusal(
                429, f"{owner!r} has {pending} samples waiting, which is its quota; try again soon", retry_after_s=1.0
            )

    def check_pending_bytes(self, owner: str, pending: int) -> None:
        limit = self.of(owner).pending_bytes
        if limit is not None and pending >= limit:
            self._metrics.quota_refused(owner, "pending_bytes")
            raise Refusal(
                429,
                f"{owner!r} has {pending:,} bytes of training data waiting, and its quota is {limit:,}; try again "
                "when some of it is done",
                retry_after_s=1.0,
            )


def exceeded(error: QuotaExceeded) -> Refusal:
    return ApiError(EXCEEDED, str(error), code=CODE)


class FairQuota:
    """A quota that one owner may fill. When it is full, owners with less than an equal share are still admitted: no
    owner is shut out by another, and n owners have at most limit * (1 + 1/2 + … + 1/n) waiting, which grows slowly."""

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
