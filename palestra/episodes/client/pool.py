"""A pool of players: many episodes at a time, until it is stopped. One task claims for all, so an idle pool costs one
waiting request.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from palestra.episodes.client.async_client import AsyncEpisodeClient
from palestra.episodes.client.async_episode import AsyncEpisode, EpisodeView, OnError
from palestra.episodes.client.errors import EpisodeApiError, EpisodeClientError, NotPlayedHere
from palestra.episodes.client.leases import GOODBYE_S
from palestra.episodes.client.players import AsyncPlayer, play_one
from palestra.types.episodes import EpisodeKind, LeaseRef

log = logging.getLogger(__name__)

CLAIM_S = 5.0
RUN_WAIT_S = 600.0  # its trainer may still be loading a model
LOOK_EVERY_S = 2.0
DRAIN_S = 60.0
REPORT_S = 10.0
TICK_S = 0.25
MAX_CLAIM = 256  # the server's limit
STOPPED = "the pool was stopped"


@dataclass(slots=True)
class PlayCounts:
    """Counts of the episodes that a pool has claimed, by outcome."""

    claimed: int = 0
    ended: int = 0
    """Ended with a reward."""
    failed: int = 0
    """Ended with the player's error as their result."""
    released: int = 0
    """Given back: by the player, by its error, or because the pool was stopped."""
    lost: int = 0
    """The server no longer accepted the result."""
    reward_sum: float = 0.0
    reason: str = ""
    """Why the pool stopped."""

    @property
    def done(self) -> int:
        return self.ended + self.failed + self.released + self.lost

    @property
    def playing(self) -> int:
        return self.claimed - self.done

    @property
    def reward_mean(self) -> float | None:
        return self.reward_sum / self.ended if self.ended else None

    def add(self, episode: EpisodeView) -> None:
        """Counts an episode that has ended."""
        if episode.result is not None and episode.ended is not None and episode.ended.is_kept:
            self.ended += episode.result.error is None
            self.failed += episode.result.error is not None
            self.reward_sum += episode.result.reward or 0.0
        else:
            self.released += episode.held_lease.can_continue
            self.lost += not episode.held_lease.can_continue

    def __str__(self) -> str:
        mean = "" if self.reward_mean is None else f" (mean reward {self.reward_mean:.3f})"
        rest = f"failed {self.failed}, released {self.released}, lost {self.lost}, playing {self.playing}"
        return f"ended {self.ended}{mean}, {rest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """How many episodes a pool plays at once, of which run, and when it stops."""

    concurrency: int = 8
    run: str | None = None
    kind: EpisodeKind | str | None = None
    lease_s: float | None = None
    max_episodes: int | None = None
    """Stop after this number of episodes."""
    idle_s: float | None = None
    """Stop when no episode was available for this time."""
    stops_at_unplayed: bool = False
    """Stop at an episode that is not played here; otherwise it is only given back."""
    run_wait_s: float = RUN_WAIT_S
    """How long to wait for a run that does not exist yet."""
    claim_s: float = CLAIM_S
    """How long a claim waits at the server."""
    drain_s: float = DRAIN_S
    """How long running episodes may continue after a stop, before they are given back."""
    on_progress: Callable[[PlayCounts], None] | None = None
    """Called every few seconds, and at the end."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency={self.concurrency}: it must be 1 or more")
        if self.kind is not None:
            EpisodeKind(self.kind)


class PlayerPool:
    """A pool of players, which runs once, on one event loop."""

    def __init__(self, client: AsyncEpisodeClient, player: AsyncPlayer, on_error: OnError, options: PoolOptions):
        self._client, self._player, self._on_error, self._options = client, player, on_error, options
        self._counts = PlayCounts()
        self._playing: dict[LeaseRef, asyncio.Task[None]] = {}
        self._claiming: asyncio.Task[list[AsyncEpisode]] | None = None
        self._changed = asyncio.Event()
        """Set when something was claimed or played, or the pool is to stop."""
        self._next_claim_at = 0.0
        self._run_missing_since: float | None = None
        self._is_stopped = False
        self._drain_until = math.inf
        self._failure: Exception | None = None
        self._busy_at = self._reported_at = time.monotonic()

    def stop(self, reason: str) -> None:
        """Stops the pool; call it on its event loop. Running episodes have `drain_s`; a second call gives them back at
        once."""
        is_second = self._drain_until < math.inf
        self._begin_stop(reason)
        self._drain_until = time.monotonic() + (0.0 if is_second else self._options.drain_s)
        self._changed.set()

    async def run(self) -> PlayCounts:
        """Runs the pool until it is stopped. A server that cannot be reached at the beginning is an error; later, it is
        waited for."""
        await self._client.calls.reach()
        try:
            while not self._is_over():
                self._claim_if_room()
                await self._wait_for_change()
                await self._take_claim()
                if time.monotonic() >= self._drain_until:
                    await self._give_up()
                self._report(every_s=REPORT_S)
        finally:
            self._begin_stop("interrupted")
            await self._take_claim()
            await self._give_up()
        self._report(every_s=0.0)
        if self._failure is not None:
            raise self._failure
        return self._counts

    def _is_over(self) -> bool:
        now = time.monotonic()
        if self._playing or self._run_missing_since is not None:
            self._busy_at = now
        elif self._options.idle_s is not None and now - self._busy_at >= self._options.idle_s:
            self._begin_stop("idle")
        if self._counts.claimed == self._options.max_episodes:
            self._begin_stop("max_episodes")
        return self._is_stopped and not self._playing and self._claiming is None

    def _claim_if_room(self) -> None:
        chosen = self._options
        room = min(chosen.concurrency - len(self._playing), MAX_CLAIM)
        if chosen.max_episodes is not None:
            room = min(room, chosen.max_episodes - self._counts.claimed)
        can_claim = self._claiming is None and time.monotonic() >= self._next_claim_at
        if room <= 0 or not can_claim or self._is_stopped:
            return
        wait_s = chosen.claim_s if chosen.idle_s is None else min(chosen.claim_s, chosen.idle_s)
        claim = self._client.claim(room, run=chosen.run, kind=chosen.kind, wait_s=wait_s, lease_s=chosen.lease_s)
        self._claiming = asyncio.create_task(claim, name="claim")
        self._claiming.add_done_callback(lambda _: self._changed.set())

    async def _wait_for_change(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await self._changed.wait()
        self._changed.clear()

    async def _take_claim(self) -> None:
        if self._claiming is None or not self._claiming.done():
            return
        claim, self._claiming = self._claiming, None
        if claim.cancelled():
            return
        if isinstance(error := claim.exception(), Exception):
            if not self._waits_for_run(error):
                self._fail(error)
            return
        self._run_missing_since = None
        await self._begin(claim.result())

    def _waits_for_run(self, error: Exception) -> bool:
        """Whether to wait because the run does not exist yet: players may start before their trainer."""
        if not isinstance(error, EpisodeApiError) or not error.is_run_missing:
            return False
        now, chosen, since = time.monotonic(), self._options, self._run_missing_since
        if now - (since or now) >= chosen.run_wait_s:
            return False
        if since is None:
            self._run_missing_since = now
            text = "%s: run %r does not exist yet; waiting up to %.0f s for it"
            log.warning(text, self._client.url, chosen.run, chosen.run_wait_s)
        self._next_claim_at = now + LOOK_EVERY_S
        return True

    def _fail(self, error: Exception) -> None:
        self._failure = error
        if self._playing:  # otherwise the error is raised at once
            log.error("nothing more is claimed: %s", error)
        self._begin_stop("claims fail")

    async def _begin(self, episodes: list[AsyncEpisode]) -> None:
        self._counts.claimed += len(episodes)
        if not self._is_stopped:
            for episode in episodes:
                task = asyncio.create_task(self._play(episode), name=f"play-{episode.id}")
                self._playing[episode.held_lease.ref] = task
            return
        try:
            leases = [episode.held_lease for episode in episodes]
            await self._client.leases.release(leases, STOPPED, retry_s=GOODBYE_S)
        except EpisodeClientError as error:
            log.warning("%d episodes were not given back: %s", len(episodes), error)
        self._counts.released += len(episodes)

    async def _play(self, episode: AsyncEpisode) -> None:
        try:
            await play_one(episode, self._player, self._on_error)
        except NotPlayedHere as error:
            if self._options.stops_at_unplayed:
                self._fail(error)
                await self._client.claims.end()  # a claim of this pool would get it again
            await episode.leave(error)
        finally:
            if self._playing.pop(episode.held_lease.ref, None) is not None:
                self._counts.add(episode)
            self._changed.set()

    def _begin_stop(self, reason: str) -> None:
        if not self._is_stopped:
            self._is_stopped, self._counts.reason = True, reason
            log.info("stopping (%s): %d running episodes are played to their end", reason, len(self._playing))
        if self._claiming is not None:
            self._claiming.cancel()  # cancelling also gives back what still arrives

    async def _give_up(self) -> None:
        """Releases the episodes that are still being played."""
        if tasks := list(self._playing.values()):
            for task in tasks:
                task.cancel(STOPPED)
            await asyncio.wait(tasks, timeout=GOODBYE_S)
            self._counts.released += len(self._playing)
            self._playing.clear()

    def _report(self, *, every_s: float) -> None:
        now = time.monotonic()
        if now - self._reported_at < every_s:
            return
        self._reported_at = now
        log.info("%s", self._counts)
        if self._options.on_progress is not None:
            self._options.on_progress(self._counts)
