"""Claims episodes: waits for some at the server, and gives back those of a claim that was cancelled."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future

from palestra.episodes.client import api
from palestra.episodes.client.errors import EpisodeApiError, EpisodeClientError
from palestra.episodes.client.heartbeat import HeldLease
from palestra.episodes.client.leases import GOODBYE_S, ClientLeases, new_id
from palestra.episodes.client.loop_thread import SHARED, outcome
from palestra.episodes.client.retries import RetryingCalls
from palestra.types.episode_wire import Claimed
from palestra.types.episodes import ClaimRequest, EpisodeKind

log = logging.getLogger(__name__)

POLL_S = 20.0
"""How long one request waits for an episode before it is sent again."""
LEAST_PAUSE_S = 0.2
"""Shortest pause between two claims, if the server answers at once."""
HANG_UP_S = 0.5
"""How long `end` waits for the answers of cancelled claims."""


class EpisodeClaims:
    def __init__(self, calls: RetryingCalls, leases: ClientLeases) -> None:
        self._calls, self._leases = calls, leases
        self._refusing: set[Future[None]] = set()
        """Cancelled claims whose answers are still to come."""

    async def claim(
        self, max_n: int, *, run: str | None, kind: EpisodeKind | None, wait_s: float | None, lease_s: float | None
    ) -> Sequence[HeldLease]:
        """Returns leases that are held from now on; none if there was no episode for `wait_s`. If this is cancelled,
        episodes that the running request still brings are given back."""
        pace = ClaimPace(wait_s)
        while True:
            request = ClaimRequest(
                client_id=self._leases.client_id,
                claim_id=new_id(),
                run=run,
                kind=kind,
                max_n=max_n,
                wait_s=pace.begin(),
                lease_s=lease_s,
            )
            claimed = await self._claim(request)
            if claimed.leases:
                return self._leases.hold(claimed.leases)
            if (pause_s := pace.pause(claimed)) is None:
                return ()
            await self._calls.pause(pause_s)

    async def _claim(self, request: ClaimRequest) -> Claimed:
        asking = SHARED.start(self._calls.do(api.claim(request)))
        try:
            return await outcome(asking)
        except asyncio.CancelledError:
            refusing = SHARED.start(self._refuse(asking))
            self._refusing.add(refusing)
            refusing.add_done_callback(self._refusing.discard)
            raise
        except EpisodeApiError as error:
            if error.status != 409:
                raise
            return Claimed(
                leases=[], retry_after_s=0.0
            )  # they expired before this client heard of them: the only way is to claim again

    async def _refuse(self, asking: Future[Claimed]) -> None:
        """Gives back leases whose claim was cancelled."""
        try:
            async with asyncio.timeout(GOODBYE_S):
                claimed = await asyncio.wrap_future(asking)
            leases = [HeldLease.of(lease) for lease in claimed.leases]
            await self._leases.release(leases, "the claim was cancelled", retry_s=GOODBYE_S)
        except (EpisodeClientError, TimeoutError) as error:
            log.info("a claim was cancelled: %s", error or "it has no leases")

    async def end(self) -> None:
        """Waits until the server no longer has claims that were cancelled here."""
        if refusing := [asyncio.wrap_future(one) for one in self._refusing.copy()]:
            _, waiting = await asyncio.wait(refusing, timeout=HANG_UP_S)
            for one in waiting:
                one.cancel()


class ClaimPace:
    """How long each request of a claim waits, and the pauses between them."""

    def __init__(self, wait_s: float | None):
        self._deadline = None if wait_s is None else time.monotonic() + wait_s
        self._begun, self._asked_s = 0.0, 0.0

    def begin(self) -> float:
        self._begun = time.monotonic()
        left_s = POLL_S if self._deadline is None else self._deadline - self._begun
        self._asked_s = min(max(left_s, 0.0), POLL_S)
        return self._asked_s

    def pause(self, claimed: Claimed) -> float | None:
        """Seconds to pause; None if the time is up."""
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            return None
        if now - self._begun > self._asked_s / 2:
            return 0.0  # the request did wait, so the next one can follow at once
        pause_s = min(max(claimed.retry_after_s, LEAST_PAUSE_S), POLL_S)
        return pause_s if self._deadline is None else min(pause_s, self._deadline - now)
