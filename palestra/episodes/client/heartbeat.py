"""Heartbeats for leases: one thread renews all leases of a client.

A lease of L seconds is due L / 3 after its last answer, so that two heartbeats may get lost. In one request with it go
all that are due within the next sixth of their own time. Before a request is sent, its leases are due again soon, and
an answer moves that to L / 3 from when it was sent: whatever breaks, the thread tries again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from palestra.episodes.client.api import BATCH
from palestra.episodes.client.errors import EpisodeApiError, EpisodeClientError, InvalidResult
from palestra.episodes.client.results import check_result
from palestra.types.episodes import EndAnswer, EndRequest, EndStatus, EpisodeResult, HeartbeatAnswer, Lease, LeaseRef

log = logging.getLogger(__name__)

BEATS = 3  # heartbeats during one lease: two may get lost
LONGEST_TRY_S = 10.0
AGAIN_S = 1.0  # pause after a heartbeat that was not answered


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease and the server's last answer about it."""

    lease: Lease
    due: float
    can_continue: bool = True
    reason: str = ""
    is_over: bool = False
    """Whether this client has ended or released it."""
    result: EpisodeResult | None = None
    """The result that was sent last. Only its own answer counts: a heartbeat in between finds that the attempt has
    ended."""
    ended: EndAnswer | None = None
    """The server's answer to the result."""

    @classmethod
    def of(cls, lease: Lease) -> HeldLease:
        return cls(lease, time.monotonic() + lease.lease_s / BEATS)

    @property
    def ref(self) -> LeaseRef:
        return LeaseRef(episode_id=self.lease.episode_id, attempt=self.lease.attempt)

    def lose(self, reason: str) -> None:
        self.can_continue, self.reason = False, reason

    def end_request(self, result: EpisodeResult) -> EndRequest:
        if self.is_over and self.ended is None:
            raise InvalidResult(f"episode {self.lease.episode_id} was given back and can no longer be ended")
        self.result = check_result(result)
        return EndRequest(episode_id=self.lease.episode_id, attempt=self.lease.attempt, result=result)

    def settle(self, ended: EndAnswer) -> EndAnswer:
        """Records the server's answer to a result. A late result is logged; a mistake of the player is raised."""
        name = self.lease.episode_id
        if ended.status is EndStatus.INVALID:  # the player may end it again with a valid result
            raise InvalidResult(f"episode {name}: {ended.detail or ended.status}")
        self.ended, self.is_over = ended, True
        if ended.status is EndStatus.CONFLICT:
            raise InvalidResult(f"episode {name} has ended with another result: {ended.detail}")
        if not ended.is_kept:
            self.lose(f"{ended.status}: {ended.detail}" if ended.detail else str(ended.status))
            log.warning("episode %s, attempt %d: the result does not count: %s", name, self.lease.attempt, ended.status)
        return ended


Send = Callable[[Sequence[LeaseRef], float], list[HeartbeatAnswer]]
"""Sends heartbeats; takes leases and a time limit. It raises what a call raises, and does not retry."""


class HeartbeatThread:
    """The thread that sends heartbeats; it lives as long as there are leases."""

    def __init__(self, send: Send):
        self._send = send
        self._changed = threading.Condition()  # protects all fields below
        self._leases: dict[LeaseRef, HeldLease] = {}
        self._thread: threading.Thread | None = None

    def add(self, leases: Sequence[HeldLease]) -> None:
        with self._changed:
            self._leases.update({lease.ref: lease for lease in leases})
            if self._thread is None and self._leases:
                self._thread = threading.Thread(target=self._run, name="episode-heartbeat", daemon=True)
                self._thread.start()
            self._changed.notify()

    def drop(self, lease: HeldLease) -> None:
        with self._changed:
            if self._leases.get(lease.ref) is lease:
                del self._leases[lease.ref]
            self._changed.notify()

    def clear(self) -> list[HeldLease]:
        """Ends the thread and returns the leases that it held."""
        with self._changed:
            lease, self._leases = list(self._leases.values()), {}
            self._changed.notify()
        return lease

    def take_in(self, beats: Sequence[HeartbeatAnswer], asked_at: float) -> None:
        """Takes over answers of the server, whoever sent the request."""
        with self._changed:
            for beat in beats:
                lease = self._leases.get(LeaseRef(episode_id=beat.episode_id, attempt=beat.attempt))
                if lease is None:
                    continue
                lease.due = asked_at + lease.lease.lease_s / BEATS
                if not beat.can_continue:
                    self._lose(lease, beat.reason)

    def _run(self) -> None:
        while batch := self._next_batch():
            self._beat(batch)

    def _next_batch(self) -> list[HeldLease]:
        """Waits until a lease is due, and returns it with those that will be due soon. Empty: there is no lease
        left."""
        with self._changed:
            while self._leases:
                now = time.monotonic()
                wait_s = min(lease.due for lease in self._leases.values()) - now
                if wait_s <= 0:
                    soon = (h for h in self._leases.values() if h.due <= now + h.lease.lease_s / BEATS / 2)
                    return sorted(soon, key=lambda held: held.due)[:BATCH]
                self._changed.wait(wait_s)
            self._thread = None
            return []

    def _beat(self, batch: Sequence[HeldLease]) -> None:
        now = time.monotonic()
        shortest_s = min(lease.lease.lease_s for lease in batch) / BEATS
        for lease in batch:  # assumed to be lost, unless the answer says otherwise
            lease.due = now + min(AGAIN_S, lease.lease.lease_s / BEATS)
        try:
            beats = self._send([lease.ref for lease in batch], min(max(shortest_s, AGAIN_S), LONGEST_TRY_S))
        except EpisodeApiError as error:
            if error.status >= 500:
                log.warning("heartbeat: %s", error)
                return
            with self._changed:  # this client may not play any more, and retrying would not help
                for lease in batch:
                    self._lose(lease, f"refused: {error.detail}")
            return
        except EpisodeClientError as error:
            log.info("heartbeat: %s", error)
            return
        except Exception:  # boundary: without this thread every lease would be lost
            log.exception("heartbeat")
            return
        self.take_in(beats, now)

    def _lose(self, lease: HeldLease, reason: str) -> None:
        if self._leases.pop(lease.ref, None) is lease and not lease.is_over:
            lease.lose(reason or "lease_lost")
            level = logging.DEBUG if lease.result is not None else logging.WARNING
            log.log(level, "episode %s, attempt %d: %s", lease.lease.episode_id, lease.lease.attempt, lease.reason)
