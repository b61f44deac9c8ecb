"""A server's episodes, for threads: claim, play, end; and the trainer's side.

Owns: this client's identity and leases. Never touches: HTTP.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import secrets
import ssl
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import SupportsFloat, Unpack

from palestra.episodes.client import api
from palestra.episodes.client.calls import RETRY_S, Calls
from palestra.episodes.client.episode import GOODBYE_S, Episode, EpisodeView, OnError, settle
from palestra.episodes.client.errors import EpisodeApiError, EpisodeClientError, InvalidResult, NoEpisode
from palestra.episodes.client.heartbeat import Heartbeat, Held
from palestra.episodes.client.results import check_result, result_of
from palestra.episodes.client.run import Run
from palestra.episodes.client.transport import Transport
from palestra.types.episodes import (
    Beat,
    Ended,
    EpisodeInfo,
    EpisodeKind,
    EpisodeResult,
    EpisodeState,
    Lease,
    LeaseRef,
    RunInfo,
    RunSettings,
)
from palestra.types.timelines import EpisodeTimeline

log = logging.getLogger(__name__)

POLL_S = 20.0
"""How long one request waits for an episode; then it is asked again."""
LEAST_PAUSE_S = 0.2
"""Between two claims, where the server does not let them wait."""


class EpisodeClient:
    """For any number of threads of one process. `key` is the server's (None: TINKER_API_KEY); `retry_s` is how long
    a server that does not answer is waited for."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        client_id: str | None = None,
        retry_s: float = RETRY_S,
        tls: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ):
        self.client_id = client_id or new_client_id()
        transport = Transport(url, tls=tls, proxy=proxy)
        self.calls = Calls(transport, key or os.environ.get("TINKER_API_KEY"), retry_s)
        self.heartbeat = Heartbeat(self._beat)

    @property
    def url(self) -> str:
        return self.calls.transport.url

    # Playing

    @contextmanager
    def episode(
        self,
        run: str | None = None,
        kind: EpisodeKind | str | None = None,
        *,
        wait_s: float | None = None,
        lease_s: float | None = None,
        on_error: OnError | str = OnError.END,
    ) -> Iterator[Episode]:
        """One to play; waits for it, at most `wait_s`. Left by an exception it ends as failed or is released, as
        `on_error` says; left without `end`, or by Ctrl-C, it is released."""
        on_error = OnError(on_error)
        found = self.claim(1, run=run, kind=kind, wait_s=wait_s, lease_s=lease_s)
        if not found:
            raise NoEpisode(f"no episode within {wait_s:g} s" + (f" in run {run!r}" if run else ""))
        episode = found[0]
        try:
            yield episode
        except BaseException as error:
            episode.leave(error, on_error)
            raise
        else:
            episode.leave()

    def claim(
        self,
        max_n: int = 1,
        *,
        run: str | None = None,
        kind: EpisodeKind | str | None = None,
        wait_s: float | None = None,
        lease_s: float | None = None,
    ) -> list[Episode]:
        """At least one, `max_n` at most, as soon as there is any; empty if there was none for `wait_s`. They are kept
        by heartbeats until they are ended or released: to be looked after by the caller."""
        pace = ClaimPace(wait_s, POLL_S)
        while True:
            request = api.claim_request(
                self.client_id, new_id(), run=run, kind=kind, max_n=max_n, lease_s=lease_s, wait_s=pace.begin()
            )
            try:
                told = self.calls.do(api.claim(request))
            except EpisodeApiError as error:
                told = too_late(error)
            if told.leases:
                return [Episode(held, self) for held in self.hold(told.leases)]
            if (pause_s := pace.pause(told)) is None:
                return []
            self.calls.closed.wait(pause_s)

    def end_many(self, ends: Iterable[tuple[Episode, EpisodeResult | SupportsFloat]]) -> list[Ended]:
        """Like `end` of each, in few requests; what is refused is told in its place, not raised."""
        pairs = [(episode, as_result(result)) for episode, result in ends]
        told: list[Ended] = []
        for batch in api.batches([episode.end_request(result) for episode, result in pairs]):
            told += self.calls.do(api.end(self.client_id, batch)).ended
        self.settle_all([episode for episode, _ in pairs], told)
        return told

    def release_many(self, episodes: Iterable[Episode], reason: str, *, retry_s: float | None = None) -> None:
        """Those that are over already stay so."""
        self._release([episode.held for episode in episodes if not episode.is_over], reason, retry_s)

    # What an episode asks of its client

    def end_one(self, episode: Episode, result: EpisodeResult) -> Ended:
        request = episode.end_request(check_result(result))
        ended = self.calls.do(api.end(self.client_id, [request])).ended[0]
        return self.settle(episode, ended)

    def give_back(self, episode: Episode, reason: str, *, retry_s: float | None = None) -> None:
        self.release_many([episode], reason, retry_s=retry_s)

    def ask(self, episode: Episode) -> None:
        asked_at = time.monotonic()
        beats = self.calls.do(api.heartbeat(self.client_id, [episode.held.ref])).beats
        self.heartbeat.take_in(beats, asked_at)

    # What both clients do with leases

    def settle(self, episode: EpisodeView, ended: Ended) -> Ended:
        try:
            return settle(episode, ended)
        finally:
            if episode.is_over:
                self.forget(episode)

    def settle_all(self, episodes: Sequence[EpisodeView], told: Sequence[Ended]) -> None:
        for episode, ended in zip(episodes, told, strict=True):
            try:
                self.settle(episode, ended)
            except InvalidResult as error:
                log.warning("%s", error)

    def forget(self, episode: EpisodeView) -> None:
        """This client does nothing more about it: no lease is kept that nobody plays under."""
        episode.held.is_over = True
        self.heartbeat.drop(episode.held)

    def hold(self, leases: Sequence[Lease]) -> list[Held]:
        held = [Held.of(lease) for lease in leases]
        self.heartbeat.add(held)
        return held

    def _release(self, held: Sequence[Held], reason: str, retry_s: float | None) -> None:
        for one in held:
            one.is_over, one.reason = True, reason
            self.heartbeat.drop(one)
        for batch in api.batches([one.ref for one in held]):
            self.calls.do(api.release(self.client_id, batch, reason), retry_s=retry_s)

    def _beat(self, leases: Sequence[LeaseRef], timeout_s: float) -> list[Beat]:
        return self.calls.do(api.heartbeat(self.client_id, leases, timeout_s), retry_s=0).beats

    # Training and looking on

    def run(self, name: str, settings: RunSettings | None = None, *, model: str | None = None) -> Run:
        """Makes it, or changes what is given of one that exists."""
        return Run(self.calls, self.calls.do(api.put_run(name, settings, model)))

    def runs(self) -> list[RunInfo]:
        return self.calls.do(api.get_runs()).runs

    def run_info(self, name: str) -> RunInfo:
        return self.calls.do(api.get_run(name))

    def delete_run(self, name: str) -> int:
        """With everything of it; how many episodes went."""
        return self.calls.do(api.delete_run(name)).deleted

    def episodes(
        self,
        run: str | None = None,
        state: EpisodeState | str | None = None,
        *,
        limit: int = 100,
        offset: int = 0,
        **which: Unpack[api.Which],
    ) -> api.EpisodeList:
        """Those that are not committed, in the order of registration; `which`: by reward, error or task."""
        return self.calls.do(api.list_episodes(run, state, limit=limit, offset=offset, **which))

    def episode_info(self, episode_id: str) -> EpisodeInfo:
        return self.calls.do(api.get_episode(episode_id))

    def timeline(self, episode_id: str) -> EpisodeTimeline:
        """With the model calls and tools of its attempts. Secrets are blacked out."""
        return self.calls.do(api.get_timeline(episode_id))

    def export(
        self,
        run: str | None = None,
        state: EpisodeState | str | None = None,
        *,
        limit: int | None = None,
        **which: Unpack[api.Which],
    ) -> Iterator[EpisodeTimeline]:
        """Timelines of those that `episodes` lists, all of them unless there is a limit, as they come."""
        return self.calls.lines(api.export_episodes(run, state, limit, which))

    def requeue(self, episode_ids: Sequence[str]) -> int:
        """Parked ones get a fresh start."""
        return self.calls.do(api.requeue(episode_ids)).requeued

    def cancel(
        self,
        run: str,
        *,
        episode_ids: Sequence[str] | None = None,
        group_ids: Sequence[str] | None = None,
        reason: str = "cancelled",
    ) -> int:
        return self.calls.do(api.cancel(run, episode_ids, group_ids, reason)).cancelled

    # Closing

    def close(self) -> None:
        """Leases that are still open are given back."""
        held = self.heartbeat.clear()
        try:
            self._release(held, "the client was closed", GOODBYE_S)
        except EpisodeClientError as error:
            log.warning("%d leases were not given back: %s", len(held), error)
        self.calls.closed.set()
        self.calls.transport.close()

    def __enter__(self) -> EpisodeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ClaimPace:
    """How long each request of a claim waits, and what is between them."""

    def __init__(self, wait_s: float | None, poll_s: float):
        self._deadline = None if wait_s is None else time.monotonic() + wait_s
        self._poll_s = poll_s
        self._begun, self._asked_s = 0.0, 0.0

    def begin(self) -> float:
        self._begun = time.monotonic()
        left_s = self._poll_s if self._deadline is None else self._deadline - self._begun
        self._asked_s = min(max(left_s, 0.0), self._poll_s)
        return self._asked_s

    def pause(self, told: api.Claimed) -> float | None:
        """None: the time is up."""
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            return None
        if now - self._begun > self._asked_s / 2:
            return 0.0  # it did wait: the next request stands in line for this one
        pause_s = min(max(told.retry_after_s or 0.0, LEAST_PAUSE_S), self._poll_s)
        return pause_s if self._deadline is None else min(pause_s, self._deadline - now)


def too_late(error: EpisodeApiError) -> api.Claimed:
    """A claim was answered when its leases had run out already (409): nothing is left of it but to claim anew."""
    if error.status != 409:
        raise error
    return api.Claimed(leases=[])


def as_result(result: EpisodeResult | SupportsFloat) -> EpisodeResult:
    return check_result(result) if isinstance(result, EpisodeResult) else result_of(result)


def new_id() -> str:
    return secrets.token_hex(16)


def new_client_id() -> str:
    """Tells people which machine and process it was."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", platform.node())[:64]
    return f"{host or 'client'}:{os.getpid()}:{secrets.token_hex(4)}"
