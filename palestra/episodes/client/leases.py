"""The leases of one client: kept by heartbeats, ended or given back.

Owns: the client's identity, what it tells the server about its leases. Never touches: claiming, players.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import secrets
import time
from collections.abc import Iterable, Sequence

from palestra.episodes.client import api
from palestra.episodes.client.calls import Calls
from palestra.episodes.client.errors import EpisodeClientError, InvalidResult
from palestra.episodes.client.heartbeat import Heartbeat, HeldLease
from palestra.episodes.client.loop_thread import SHARED
from palestra.types.episodes import Beat, Ended, EpisodeResult, Lease, LeaseRef

log = logging.getLogger(__name__)

GOODBYE_S = 5.0  # a server that is gone finds out by itself


class Leases:
    def __init__(self, calls: Calls, client_id: str | None = None):
        self.calls, self.client_id = calls, client_id or new_client_id()
        self.heartbeat = Heartbeat(self._beat)

    def hold(self, leases: Sequence[Lease]) -> list[HeldLease]:
        held = [HeldLease.of(lease) for lease in leases]
        self.heartbeat.add(held)
        return held

    def forget(self, held: HeldLease) -> None:
        """This client does nothing more about it: no lease is kept that nobody plays under."""
        held.is_over = True
        self.heartbeat.drop(held)

    async def end(self, held: HeldLease, result: EpisodeResult) -> Ended:
        told = await self.calls.do(api.end(self.client_id, [held.end_request(result)]))
        return self._settle(held, told.ended[0])

    async def end_many(self, results: Sequence[tuple[HeldLease, EpisodeResult]]) -> list[Ended]:
        """What is refused is told in its place, not raised."""
        told: list[Ended] = []
        for batch in api.batches([held.end_request(result) for held, result in results]):
            told += (await self.calls.do(api.end(self.client_id, batch))).ended
        for (held, _), ended in zip(results, told, strict=True):
            try:
                self._settle(held, ended)
            except InvalidResult as error:
                log.warning("%s", error)
        return told

    async def release(self, leases: Iterable[HeldLease], reason: str, *, retry_s: float | None = None) -> None:
        """Those that are over already stay so."""
        held = [one for one in leases if not one.is_over]
        for one in held:
            one.reason = reason
            self.forget(one)
        for batch in api.batches([one.ref for one in held]):
            await self.calls.do(api.release(self.client_id, batch, reason), retry_s=retry_s)

    async def check(self, held: HeldLease) -> None:
        asked_at = time.monotonic()
        told = await self.calls.do(api.heartbeat(self.client_id, [held.ref]))
        self.heartbeat.take_in(told.beats, asked_at)

    async def close(self) -> None:
        """Those that are still open are given back."""
        held = self.heartbeat.clear()
        try:
            await self.release(held, "the client was closed", retry_s=GOODBYE_S)
        except EpisodeClientError as error:
            log.warning("%d leases were not given back: %s", len(held), error)

    def _settle(self, held: HeldLease, ended: Ended) -> Ended:
        try:
            return held.settle(ended)
        finally:
            if held.is_over:
                self.forget(held)

    def _beat(self, leases: Sequence[LeaseRef], timeout_s: float) -> list[Beat]:
        """In the heartbeat's thread."""
        return SHARED.wait(self.calls.do(api.heartbeat(self.client_id, leases, timeout_s), retry_s=0)).beats


def new_id() -> str:
    return secrets.token_hex(16)


def new_client_id() -> str:
    """Tells people which machine and process it was."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", platform.node())[:64]
    return f"{host or 'client'}:{os.getpid()}:{secrets.token_hex(4)}"
