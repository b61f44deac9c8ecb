"""The leases of one client: renewed by heartbeats, ended or given back."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from palestra.episodes.client import api
from palestra.episodes.client.errors import EpisodeClientError, InvalidResult
from palestra.episodes.client.heartbeat import HeartbeatThread, HeldLease
from palestra.episodes.client.loop_thread import SHARED, outcome
from palestra.episodes.client.retries import RetryingCalls
from palestra.types.episode_wire import HeartbeatAnswers
from palestra.types.episodes import EndAnswer, EpisodeResult, HeartbeatAnswer, Lease, LeaseRef

log = logging.getLogger(__name__)

GOODBYE_S = 5.0  # a server that is gone notices the end of a lease by itself


class ClientLeases:
    def __init__(self, calls: RetryingCalls, client_id: str | None = None):
        self.calls, self.client_id = calls, client_id or new_client_id()
        self.heartbeat = HeartbeatThread(self._beat)
        self._releasing: set[Future[HeartbeatAnswers]] = set()

    def hold(self, leases: Sequence[Lease]) -> list[HeldLease]:
        held_leases = [HeldLease.of(lease) for lease in leases]
        self.heartbeat.add(held_leases)
        return held_leases

    def forget(self, lease: HeldLease) -> None:
        """Stops renewing a lease: this client does nothing more about it."""
        lease.is_over = True
        self.heartbeat.drop(lease)

    async def end(self, lease: HeldLease, result: EpisodeResult) -> EndAnswer:
        answer = await self.calls.do(api.end(self.client_id, [lease.end_request(result)]))
        return self._settle(lease, answer.ended[0])

    async def end_many(self, results: Sequence[tuple[HeldLease, EpisodeResult]]) -> list[EndAnswer]:
        """Ends episodes. A refusal is returned in its place, not raised."""
        answers: list[EndAnswer] = []
        for batch in api.batches([lease.end_request(result) for lease, result in results]):
            answers += (await self.calls.do(api.end(self.client_id, batch))).ended
        for (lease, _), ended in zip(results, answers, strict=True):
            try:
                self._settle(lease, ended)
            except InvalidResult as error:
                log.warning("%s", error)
        return answers

    async def release(self, leases: Iterable[HeldLease], reason: str, *, retry_s: float | None = None) -> None:
        """Releases leases; those that are over are not changed. If this is cancelled, the request still goes out."""
        open_leases = [one for one in leases if not one.is_over]
        for one in open_leases:
            one.reason = reason
            self.forget(one)
        for batch in api.batches([one.ref for one in open_leases]):
            releasing = SHARED.start(self.calls.do(api.release(self.client_id, batch, reason), retry_s=retry_s))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)
            await outcome(releasing)

    async def check(self, lease: HeldLease) -> None:
        asked_at = time.monotonic()
        answer = await self.calls.do(api.heartbeat(self.client_id, [lease.ref]))
        self.heartbeat.take_in(answer.beats, asked_at)

    async def close(self) -> None:
        """Releases the leases that are still open."""
        open_leases = self.heartbeat.clear()
        try:
            await self.release(open_leases, "the client was closed", retry_s=GOODBYE_S)
        except EpisodeClientError as error:
            log.warning("%d leases were not given back: %s", len(open_leases), error)
        if releasing := [asyncio.wrap_future(one) for one in self._releasing.copy()]:
            await asyncio.wait(releasing, timeout=GOODBYE_S)

    def _settle(self, lease: HeldLease, ended: EndAnswer) -> EndAnswer:
        try:
            return lease.settle(ended)
        finally:
            if lease.is_over:
                self.forget(lease)

    def _beat(self, leases: Sequence[LeaseRef], timeout_s: float) -> list[HeartbeatAnswer]:
        """Sends heartbeats; runs in the heartbeat thread."""
        return SHARED.wait(self.calls.do(api.heartbeat(self.client_id, leases, timeout_s), retry_s=0)).beats


def new_id() -> str:
    return secrets.token_hex(16)


def new_client_id() -> str:
    """Returns an id that contains the machine's name and the process id, for people who read it."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", platform.node())[:64]
    return f"{host or 'client'}:{os.getpid()}:{secrets.token_hex(4)}"
