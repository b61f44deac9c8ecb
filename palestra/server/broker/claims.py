"""Claims: answered at once, or in turn after waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from palestra.episodes.board import EpisodeBoard
from palestra.episodes.errors import BoardError
from palestra.server.broker.backpressure import Backpressure
from palestra.server.broker.board_writer import PendingWrite
from palestra.server.broker.broker import BoardRefusal, Broker
from palestra.server.broker.claim_rate_limits import RateLimiter
from palestra.server.broker.tracing import traceparent_of
from palestra.server.broker.waiting_claims import PassedOver, Waiter, WaitingClaims
from palestra.server.core.errors import Refusal
from palestra.server.core.owners.callers import AttemptRef
from palestra.types.episodes import ClaimBlocker, ClaimRequest, Lease


class Claim(Struct, frozen=True):
    owner: str
    request: ClaimRequest
    is_free: Callable[[], bool] | None = None
    """Says whether it may be served at the moment, while it waits. None: always."""
    base_url: str = ""
    """The address at which its player reaches the model."""
    model: str = ""
    """The model of runs that have none yet."""

    @property
    def interest(self) -> tuple[str, ...]:
        """Claims that may not be served do not hold up others that may."""
        return self.owner, self.request.run or "", self.request.kind or "", "" if self.is_free is None else "if free"

    @property
    def name(self) -> tuple[str, str, str]:
        return self.owner, self.request.client_id, self.request.claim_id


class ServedClaim(Struct, frozen=True):
    leases: list[Lease]
    write: PendingWrite | None = None
    """The leases must not be sent before this write is saved."""


Got = ServedClaim | BoardError
Hold = Callable[[Coroutine[Any, Any, list[Lease]]], Awaitable[list[Lease]]]


class ClaimService:
    def __init__(self, broker: Broker, pressure: Backpressure, check_owner: Callable[[str], None]):
        """`check_owner` refuses owners whose players could not sample now."""
        self._broker, self._pressure, self._check_owner = broker, pressure, check_owner
        self._rates = RateLimiter(broker.config.max_claims_per_s)
        self._waiting: WaitingClaims[Claim, Got] = WaitingClaims()
        broker.on_claimable = self._hand_out
        broker.observer.watch_claims(lambda: len(self._waiting))

    async def claim(self, claim: Claim, hold: Hold | None = None) -> list[Lease]:
        """Returns leases; empty if nothing came within its `wait_s`. If it is cancelled while it waits, nothing is
        claimed. `hold` awaits the wait, and may end it early."""
        broker, began_at = self._broker, self._broker.clock.now()
        self._check_rate(claim, began_at)
        self._check_owner(claim.owner)
        if len(self._waiting):
            # episodes that become due go to claims that have waited longer
            broker.apply(lambda board, now: board.tick(now))
        leases = await broker.do(lambda board, now: self._take(board, claim, now))
        if not leases and claim.request.wait_s > 0:
            waiting = self._wait(claim)
            leases = await (waiting if hold is None else hold(waiting))
            await broker.saving.saved()
        broker.observer.claimed(claim.owner, claim.request, leases, broker.clock.now() - began_at)
        return leases

    def _check_rate(self, claim: Claim, now: float) -> None:
        if wait_s := self._rates.wait_s((claim.owner, claim.request.client_id), now):
            most = f"{self._broker.config.max_claims_per_s:g} in a second"
            raise Refusal(
                429, f"one client may send at most {most} claims; claim more episodes at once", retry_after_s=wait_s
            )

    def why_nothing(self, claim: Claim) -> str:
        """Returns why a claim got nothing; empty: there is nothing to play."""
        full = self._pressure.full()
        hold = self._broker.apply(lambda board, _now: board.why_nothing(claim.owner, claim.request, full=full))
        return str(hold or "")

    def _take(self, board: EpisodeBoard, claim: Claim, now: float) -> list[Lease]:
        leases = board.claim(claim.owner, claim.request, now, full=self._pressure.full())
        keys = self._broker.keys
        refs = [AttemptRef(claim.owner, lease.episode_id, lease.attempt) for lease in leases]
        return [
            replace(
                lease,
                api_key=keys.open(ref),
                base_url=claim.base_url,
                model=lease.model or claim.model,
                traceparent=traceparent_of(ref.origin),
            )
            for lease, ref in zip(leases, refs, strict=True)
        ]

    async def _wait(self, claim: Claim) -> list[Lease]:
        config = self._broker.config
        if self._broker.is_stopping or len(self._waiting) >= config.max_waiting:
            return []
        # `hold` may begin to wait one turn of the loop later: an event in between would have woken no call.
        if leases := self._broker.apply(lambda board, now: self._take(board, claim, now)):
            await self._broker.saving.saved()
            return leases
        waiter = self._waiting.join(claim, claim.interest, claim.name)
        try:
            await asyncio.wait({waiter.got}, timeout=min(claim.request.wait_s, config.max_wait_s))
        finally:
            self._waiting.begin_shutdown(waiter)
        if not waiter.got.done():
            return []
        got = waiter.got.result()
        if isinstance(got, BoardError):
            raise BoardRefusal(got)
        if got.write is not None:
            await got.write.saved()
        return got.leases

    def _hand_out(self, is_concerned: Callable[[str], bool]) -> None:
        """Gives episodes to the claims that have waited longest. Those that would get nothing continue to wait."""
        if not len(self._waiting):
            return
        broker = self._broker

        def take(waiter: Waiter[Claim, Got]) -> Got | PassedOver | None:
            if broker.is_stopping:
                return ServedClaim([])
            if waiter.request.is_free is not None and not waiter.request.is_free():
                return None
            try:
                leases = self._take(broker.board, waiter.request, broker.clock.now())
            except BoardError as error:
                return error
            if not leases:
                return self._passed_over(broker.board, waiter.request)
            broker.saving.touch()
            return ServedClaim(leases, broker.saving.last)

        self._waiting.hand_out(take, is_concerned)

    def _passed_over(self, board: EpisodeBoard, claim: Claim) -> PassedOver | None:
        """Returns why a claim got nothing. If a client has used up its share, others that wait for the same may still
        get something."""
        hold = board.why_nothing(claim.owner, claim.request, full=self._pressure.full())
        return PassedOver() if hold is not None and hold.code is ClaimBlocker.CLIENT_SHARE else None
