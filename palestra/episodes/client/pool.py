"""Many episodes at a time, until told to stop.

One thread claims for all, so that an idle pool costs one request that waits; the thread that runs the pool hears of
everything through a mailbox. Owns: how many are played at once, drain, counts. Never touches: what a player does.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from palestra.episodes.client.client import EpisodeClient
from palestra.episodes.client.episode import GOODBYE_S, Episode
from palestra.episodes.client.errors import EpisodeApiError, EpisodeClientError
from palestra.episodes.client.players import STOPPED, Played, Players
from palestra.types.episodes import EpisodeKind, LeaseRef

log = logging.getLogger(__name__)

CLAIM_S = 5.0
RUN_WAIT_S = 600.0  # its trainer may be loading a model
LOOK_EVERY_S = 2.0
DRAIN_S = 60.0
REPORT_S = 10.0
TICK_S = 0.25
MAX_CLAIM = 256  # of the server


@dataclass(slots=True)
class PlayCounts:
    claimed: int = 0
    ended: int = 0
    """With a reward."""
    failed: int = 0
    """Ended with the player's error as their result."""
    released: int = 0
    """Given back: by the player, by its error, or because the pool was stopped."""
    lost: int = 0
    """The server did not take the result any more."""
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

    def add(self, played: Played) -> None:
        setattr(self, played.outcome, getattr(self, played.outcome) + 1)
        self.reward_sum += played.reward or 0.0

    def __str__(self) -> str:
        mean = "" if self.reward_mean is None else f" (mean reward {self.reward_mean:.3f})"
        rest = f"failed {self.failed}, released {self.released}, lost {self.lost}, playing {self.playing}"
        return f"ended {self.ended}{mean}, {rest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    concurrency: int = 8
    run: str | None = None
    kind: EpisodeKind | str | None = None
    lease_s: float | None = None
    max_episodes: int | None = None
    """Stop after so many."""
    idle_s: float | None = None
    """Stop when there was nothing to play for so long."""
    run_wait_s: float = RUN_WAIT_S
    """How long to wait for a run that nobody has made yet."""
    claim_s: float = CLAIM_S
    """How long a claim waits at the server; a stop waits for it."""
    drain_s: float = DRAIN_S
    """What is played when the pool is stopped may go on for so long; then it is given back."""
    on_progress: Callable[[PlayCounts], None] | None = None
    """Every few seconds, and at the end."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency={self.concurrency}: it has to be 1 or more")
        if self.kind is not None:
            EpisodeKind(self.kind)


@dataclass(frozen=True, slots=True)
class Claimed:
    episodes: list[Episode]


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    error: Exception


@dataclass(frozen=True, slots=True)
class Stop:
    reason: str


class Pool:
    def __init__(self, client: EpisodeClient, players: Players, options: PoolOptions):
        self._client, self._players, self._options = client, players, options
        self._mail: queue.SimpleQueue[Claimed | ClaimFailed | Stop | Played] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Of `_is_done`: a claim that comes after the end is given back by its own thread."""
        self._is_done = False
        self._counts = PlayCounts()
        self._playing: dict[LeaseRef, Episode] = {}
        self._is_claiming = False
        self._next_claim_at = 0.0
        self._run_missing_since: float | None = None
        self._stopped_at: float | None = None
        self._drain_until = math.inf
        self._failure: Exception | None = None
        self._busy_at = self._reported_at = time.monotonic()

    def stop(self, reason: str) -> None:
        """From any thread, or a signal handler: this queue may be interrupted by itself. Twice: at once."""
        self._mail.put(Stop(reason))

    def run(self) -> PlayCounts:
        """In one thread, once. A server that is not there is not waited for; one that goes away later is."""
        self._client.calls.reach()
        try:
            while not self._is_over():
                self._claim_if_room()
                self._take_in()
                if time.monotonic() >= self._drain_until:
                    self._give_up()
                self._report(every_s=REPORT_S)
        finally:
            self._give_up()
            self._close_mailbox()
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
        if self._stopped_at is None or self._playing:
            return False
        return not self._is_claiming or now - self._stopped_at > 2 * self._options.claim_s

    def _claim_if_room(self) -> None:
        chosen = self._options
        room = min(chosen.concurrency - len(self._playing), MAX_CLAIM)
        if chosen.max_episodes is not None:
            room = min(room, chosen.max_episodes - self._counts.claimed)
        can_claim = not self._is_claiming and time.monotonic() >= self._next_claim_at
        if room > 0 and can_claim and self._stopped_at is None:
            self._is_claiming = True
            threading.Thread(target=self._claim, args=(room,), name="episode-claim", daemon=True).start()

    def _claim(self, room: int) -> None:
        chosen = self._options
        wait_s = chosen.claim_s if chosen.idle_s is None else min(chosen.claim_s, chosen.idle_s)
        try:
            mail = Claimed(
                self._client.claim(room, run=chosen.run, kind=chosen.kind, wait_s=wait_s, lease_s=chosen.lease_s)
            )
        except Exception as error:
            mail = ClaimFailed(error)
        with self._lock:
            if not self._is_done:
                self._mail.put(mail)
                return
        if isinstance(mail, Claimed):
            self._give_back(mail.episodes)

    def _take_in(self) -> None:
        try:
            mail = self._mail.get(timeout=TICK_S)
        except queue.Empty:
            return
        match mail:
            case Claimed(episodes):
                self._is_claiming, self._run_missing_since = False, None
                self._begin(episodes)
            case ClaimFailed(error):
                self._is_claiming = False
                if not self._waits_for_run(error):
                    self._fail(error)
            case Played():
                if self._playing.pop(mail.ref, None) is not None:
                    self._counts.add(mail)
            case Stop(reason):
                is_second = self._drain_until < math.inf
                self._begin_stop(reason)
                self._drain_until = time.monotonic() + (0.0 if is_second else self._options.drain_s)

    def _waits_for_run(self, error: Exception) -> bool:
        """Players may be there before their trainer."""
        if not isinstance(error, EpisodeApiError) or not error.is_run_missing:
            return False
        now, chosen, since = time.monotonic(), self._options, self._run_missing_since
        if now - (since or now) >= chosen.run_wait_s:
            return False
        if since is None:
            self._run_missing_since = now
            said = "%s: waiting for run %r, which nobody has made yet, for up to %.0f s"
            log.warning(said, self._client.url, chosen.run, chosen.run_wait_s)
        self._next_claim_at = now + LOOK_EVERY_S
        return True

    def _fail(self, error: Exception) -> None:
        self._failure = error
        if self._playing:  # else it is raised at once
            log.error("nothing more is claimed: %s", error)
        self._begin_stop("claims fail")

    def _begin(self, episodes: list[Episode]) -> None:
        self._counts.claimed += len(episodes)
        if self._stopped_at is not None:
            self._give_back(episodes)
            self._counts.released += len(episodes)
            return
        for episode in episodes:
            self._playing[episode.held.ref] = episode
            self._players.start(episode, self._mail.put)

    def _begin_stop(self, reason: str) -> None:
        if self._stopped_at is None:
            self._stopped_at, self._counts.reason = time.monotonic(), reason
            log.info("stopping (%s): %d episodes are played to their end", reason, len(self._playing))

    def _give_up(self) -> None:
        """What is still played is given back."""
        if not self._playing:
            return
        self._begin_stop("interrupted")
        self._players.stop(list(self._playing.values()))
        while not self._mail.empty():
            self._take_in()
        self._counts.released += len(self._playing)
        self._playing.clear()

    def _close_mailbox(self) -> None:
        with self._lock:
            self._is_done = True
        while not self._mail.empty():
            mail = self._mail.get()
            if isinstance(mail, Claimed):
                self._give_back(mail.episodes)

    def _give_back(self, episodes: list[Episode]) -> None:
        try:
            self._client.release_many(episodes, STOPPED, retry_s=GOODBYE_S)
        except EpisodeClientError as error:
            log.warning("%d episodes were not given back: %s", len(episodes), error)

    def _report(self, *, every_s: float) -> None:
        now = time.monotonic()
        if now - self._reported_at < every_s:
            return
        self._reported_at = now
        log.info("%s", self._counts)
        if self._options.on_progress is not None:
            self._options.on_progress(self._counts)
