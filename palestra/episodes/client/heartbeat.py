"""Leases that are kept while somebody plays: one thread tells the server about all of a client's.

Owns: when to beat, what is known of each lease. Never touches: what is played under them.
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
from palestra.types.episodes import Beat, Ended, EndRequest, EndStatus, EpisodeResult, Lease, LeaseRef

log = logging.getLogger(__name__)

BEATS = 3  # in a lease: two may get lost
LONGEST_TRY_S = 10.0
AGAIN_S = 1.0  # after a beat that was not answered


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease, and what the server said about it last."""

    lease: Lease
    due: float
    can_continue: bool = True
    reason: str = ""
    is_over: bool = False
    """Ended or released by this client."""
    result: EpisodeResult | None = None
    """As it was sent last. Its answer tells: a beat that comes between finds the attempt ended."""
    ended: Ended | None = None
    """What the server made of it."""

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
            raise InvalidResult(f"episode {self.lease.episode_id} was given back: it cannot be ended any more")
        self.result = check_result(result)
        return EndRequest(episode_id=self.lease.episode_id, attempt=self.lease.attempt, result=result)

    def settle(self, ended: Ended) -> Ended:
        """Notes what the server made of a result. Too late is told and logged; what is the player's mistake is
        raised."""
        name = self.lease.episode_id
        if ended.status is EndStatus.INVALID:  # it may be ended again, better
            raise InvalidResult(f"episode {name}: {ended.detail or ended.status}")
        self.ended, self.is_over = ended, True
        if ended.status is EndStatus.CONFLICT:
            raise InvalidResult(f"episode {name} has ended with another result: {ended.detail}")
        if not ended.is_kept:
            self.lose(f"{ended.status}: {ended.detail}" if ended.detail else str(ended.status))
            log.warning("episode %s, attempt %d: the result does not count: %s", name, self.lease.attempt, ended.status)
        return ended


Send = Callable[[Sequence[LeaseRef], float], list[Beat]]
"""Leases and a time limit in; raises what a call raises, and does not repeat itself."""


class Heartbeat:
    """Its thread lives as long as there are leases."""

    def __init__(self, send: Send):
        self._send = send
        self._changed = threading.Condition()  # protects all below
        self._held: dict[LeaseRef, HeldLease] = {}
        self._thread: threading.Thread | None = None

    def add(self, leases: Sequence[HeldLease]) -> None:
        with self._changed:
            self._held.update({held.ref: held for held in leases})
            if self._thread is None and self._held:
                self._thread = threading.Thread(target=self._run, name="episode-heartbeat", daemon=True)
                self._thread.start()
            self._changed.notify()

    def drop(self, held: HeldLease) -> None:
        with self._changed:
            if self._held.get(held.ref) is held:
                del self._held[held.ref]
            self._changed.notify()

    def clear(self) -> list[HeldLease]:
        """The thread ends; returns what it held."""
        with self._changed:
            held, self._held = list(self._held.values()), {}
            self._changed.notify()
        return held

    def take_in(self, beats: Sequence[Beat], asked_at: float) -> None:
        """What the server said, whoever asked."""
        with self._changed:
            for beat in beats:
                held = self._held.get(LeaseRef(episode_id=beat.episode_id, attempt=beat.attempt))
                if held is None:
                    continue
                held.due = asked_at + held.lease.lease_s / BEATS
                if not beat.can_continue:
                    self._lose(held, beat.reason)

    def _run(self) -> None:
        while batch := self._next_batch():
            self._beat(batch)

    def _next_batch(self) -> list[HeldLease]:
        """Waits until one is due, and takes those along that soon will be. Empty: there is no lease left."""
        with self._changed:
            while self._held:
                now = time.monotonic()
                wait_s = min(held.due for held in self._held.values()) - now
                if wait_s <= 0:
                    soon = (h for h in self._held.values() if h.due <= now + h.lease.lease_s / BEATS / 2)
                    return sorted(soon, key=lambda held: held.due)[:BATCH]
                self._changed.wait(wait_s)
            self._thread = None
            return []

    def _beat(self, batch: Sequence[HeldLease]) -> None:
        now = time.monotonic()
        shortest_s = min(held.lease.lease_s for held in batch) / BEATS
        for held in batch:  # unless the answer says otherwise
            held.due = now + min(AGAIN_S, held.lease.lease_s / BEATS)
        try:
            beats = self._send([held.ref for held in batch], min(max(shortest_s, AGAIN_S), LONGEST_TRY_S))
        except EpisodeApiError as error:
            if error.status >= 500:
                log.warning("heartbeat: %s", error)
                return
            with self._changed:  # this client may not play any more, and trying again would not help
                for held in batch:
                    self._lose(held, f"refused: {error.detail}")
            return
        except EpisodeClientError as error:
            log.info("heartbeat: %s", error)
            return
        except Exception:  # without this thread every lease would be lost
            log.exception("heartbeat")
            return
        self.take_in(beats, now)

    def _lose(self, held: HeldLease, reason: str) -> None:
        if self._held.pop(held.ref, None) is held and not held.is_over:
            held.lose(reason or "lease_lost")
            level = logging.DEBUG if held.result is not None else logging.WARNING
            log.log(level, "episode %s, attempt %d: %s", held.lease.episode_id, held.lease.attempt, held.reason)
