"""Owners as an admin sees them: their limits, and what they have of each now.

Owns: putting it together. Never touches: counting, limits.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from msgspec import Struct
from sqlalchemy import Connection

from palestra.server.core.owners.quotas import OwnerQuotas
from palestra.server.core.owners.usage import UsageAccount
from palestra.server.core.pictures.picture_cache import PictureCache
from palestra.server.core.samples.requests import SamplingRequests
from palestra.server.core.training.requests import TrainingRequests
from palestra.store import Store
from palestra.store.queries.keys import list_keys
from palestra.store.queries.quotas import stored_bytes
from palestra.store.queries.usage import UsageGrouping, read_usage
from palestra.store.records import ALL_OWNERS, Quota


class OwnerUse(Struct, frozen=True, kw_only=True):
    """What an owner has now, by the names of the limits."""

    models: int
    pending_samples: int
    pending_bytes: int
    tokens_per_day: int
    """Tokens that were used today."""
    checkpoint_bytes: int
    picture_bytes: int


class OwnerState(Struct, frozen=True, kw_only=True):
    owner: str
    limits: Quota
    """Those that hold: its own, and where it has none those for all owners."""
    own: Quota
    """Its own limits."""
    used: OwnerUse


class OwnerStates:
    def __init__(
        self,
        store: Store,
        training: TrainingRequests,
        sampling: SamplingRequests,
        quotas: OwnerQuotas,
        usage: UsageAccount,
        pictures: PictureCache,
    ):
        self._store, self._training, self._sampling, self._quotas = store, training, sampling, quotas
        self._usage, self._pictures = usage, pictures

    async def read(self, owner: str | None = None) -> list[OwnerState]:
        """Returns all owners that have a key, a limit, a model or have ever used anything; or one of them."""

        def read(c: Connection) -> tuple[set[str], dict[str, int]]:
            known = {key.owner for key in list_keys(c)} | {one.owner for one in read_usage(c, (UsageGrouping.OWNER,))}
            return known, stored_bytes(c)

        known, kept = await self._store.read(read)
        models = Counter(model.owner for model in self._training.models.values())
        seen = await asyncio.to_thread(self._pictures.used_by_owner)
        owners = {*known, *kept, *models, *self._quotas.stored} - {ALL_OWNERS} if owner is None else {owner}
        return [
            OwnerState(
                owner=one,
                limits=self._quotas.of(one),
                own=self._quotas.stored.get(one, Quota(owner=one)),
                used=OwnerUse(
                    models=models[one],
                    pending_samples=self._sampling.pending_of(one),
                    pending_bytes=self._training.pending_bytes_of(one),
                    tokens_per_day=self._usage.tokens_today(one),
                    checkpoint_bytes=kept.get(one, 0),
                    picture_bytes=seen(one),
                ),
            )
            for one in sorted(owners)
        ]
