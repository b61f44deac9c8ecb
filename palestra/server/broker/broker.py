"""The broker of episodes: the only owner of the board in memory, which answers when every change is on disk."""

from __future__ import annotations

import asyncio
import gc
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from palestra.config.serve import EpisodesConfig
from palestra.episodes.board import EpisodeBoard
from palestra.episodes.board_events import OpenLease, RunProgress
from palestra.episodes.errors import BoardError
from palestra.episodes.limits import EpisodeLimits
from palestra.episodes.staging import Parts
from palestra.server.broker.attempt_keys import MAX_VOID, EpisodeKeys
from palestra.server.broker.board_writer import BoardWriter, NotSaved
from palestra.server.broker.clock import LOOK_S, Clock
from palestra.server.broker.observer import EpisodeObserver
from palestra.server.broker.signals import NamedEvents
from palestra.server.core.errors import Refusal
from palestra.server.core.owners.callers import AttemptRef
from palestra.store import Store
from palestra.store.queries.episodes import load_all, save_changes
from palestra.types.episode_rows import EpisodeRow, SavedRows
from palestra.types.episodes import LeaseRef

log = structlog.get_logger()

T = TypeVar("T")

RELOAD_S = 1.0  # after a failed write: a full disk stays full for a while


class Broker:
    """The broker, on one event loop. Every call goes through `do`: it changes the board at once, in the order of the
    calls, and returns when the change is on disk. After a failed write, the board is read from the disk again."""

    def __init__(self, store: Store, config: EpisodesConfig, observer: EpisodeObserver, secret: str):
        self.config, self.observer = config, observer
        self.clock, self.keys = Clock(), EpisodeKeys(secret)
        self.has_groups, self.is_resumed = NamedEvents(), NamedEvents()
        """Events by owner and run: there is something to read; held model calls may try again."""
        self.on_claimable: Callable[[Callable[[str], bool]], None] = lambda _is_concerned: None
        """Called with a test for owners for whom there is something to claim."""
        self.on_over: Callable[[AttemptRef], None] = lambda _attempt: None
        self.on_delivered: Callable[[tuple[str, str], RunProgress], None] = lambda _run, _progress: None
        self.on_deleted: Callable[[tuple[str, str]], None] = lambda _run: None
        self.on_restored: Callable[[], None] = lambda: None
        self.is_stopping = False
        self._store = store
        self._salt = hashlib.sha256(b"episode ids\0" + secret.encode()).digest()
        self._board: EpisodeBoard | None = None
        """None while it is read from the disk."""
        self._open_calls: dict[LeaseRef, int] = {}
        """Model calls that run while the board is reloaded."""
        self.saving = BoardWriter(self._write, self._on_failure)
        self._alarm, self._wakes_at = asyncio.Event(), 0.0
        self._reloading: asyncio.Task[None] | None = None
        observer.watch(lambda: self._board, self.clock)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._restore(await self._store.read(load_all))
        ticking = asyncio.create_task(self._tick_often(), name="episode clock")
        try:
            yield
        finally:
            ticking.cancel()
            if self._reloading is not None:
                self._reloading.cancel()
            await self.saving.settle_down()

    def begin_shutdown(self) -> None:
        """Answers all waiting requests at once."""
        self.is_stopping = True
        self.on_claimable(lambda _owner: True)
        self.has_groups.wake_all()
        self.is_resumed.wake_all()

    # How every call is done

    async def do(self, work: Callable[[EpisodeBoard, float], T]) -> T:
        try:
            return self.apply(work)
        finally:
            await self.saving.saved()  # also before a refusal, because it may refer to something new

    async def do_in_parts(self, work: Callable[[EpisodeBoard, float], Parts[T]]) -> T:
        """Like `do`, in parts. After each part other calls get their turn, and a write of their own."""
        board, parts = self.board, self.apply(work)
        try:
            while not isinstance(done := self.apply(lambda now, _now: _next(now, board, parts)), _Done):
                await self.saving.saved()
            return done.value
        finally:
            if self._board is board:
                self.apply(lambda _board, _now: parts.close())
            await self.saving.saved()

    def apply(self, work: Callable[[EpisodeBoard, float], T]) -> T:
        """Changes the board; the change is not durable yet: see `saving`."""
        board = self.board
        try:
            return work(board, self.clock.now())
        except BoardError as error:
            raise BoardRefusal(error) from None
        finally:
            self._pass_on(board)

    def look(self, see: Callable[[EpisodeBoard], T]) -> T:
        """Reads the board; this changes nothing and does not wait for the disk."""
        try:
            return see(self.board)
        except BoardError as error:
            raise BoardRefusal(error) from None

    def look_again(self, owner: str | None = None) -> None:
        """Lets waiting claims of an owner, or of all owners, be tried again. Reading the board again does this
        anyway."""
        if self._board is not None:
            self.apply(lambda _board, _now: self.on_claimable(lambda one: owner in (None, one)))

    def call_over(self, attempt: AttemptRef) -> None:
        """Notes the end of a model call, however it went. The board may be reloading at the moment."""
        if self._board is not None:
            self.apply(lambda board, now: board.call_over(attempt.ref, now))
        elif (count := self._open_calls.get(attempt.ref, 0)) > 1:
            self._open_calls[attempt.ref] = count - 1
        else:
            self._open_calls.pop(attempt.ref, None)

    @property
    def board(self) -> EpisodeBoard:
        if self._board is None:
            raise Refusal(
                503, "the server is reading its episodes from disk; send the request again", retry_after_s=RELOAD_S
            )
        return self._board

    def _pass_on(self, board: EpisodeBoard) -> None:
        """Passes changes to the disk and to those who wait for them."""
        while True:
            news = board.take_news()
            for lease in news.over:
                self._lease_is_over(board, lease)
            for run in news.delivered:
                progress = board.progress(*run)
                self.observer.delivered(run, progress, self.clock.latest)
                self.has_groups.wake(run)
                self.on_delivered(run, progress)
            for run in news.deleted:
                self.observer.deleted(run)
                self.has_groups.wake(run)  # so that readers learn of the deletion
                self.on_deleted(run)
            if not news.claimable:
                break
            self.on_claimable(news.claimable.__contains__)
        self.saving.touch()
        if board.earliest_event() < self._wakes_at:
            self._alarm.set()

    def _lease_is_over(self, board: EpisodeBoard, lease: OpenLease) -> None:
        attempt = AttemptRef(lease.owner, lease.ref.episode_id, lease.ref.attempt)
        self.keys.void(attempt)
        self.on_over(attempt)
        self.is_resumed.wake((lease.owner, lease.run))  # so that held calls learn that their attempt is over
        self.observer.over(board, lease)

    # Time

    async def _tick_often(self) -> None:
        while True:
            due = None if self._board is None else self._board.next_event()
            now = self.clock.now()
            self._wakes_at = now + LOOK_S if due is None else min(max(due, now), now + LOOK_S)
            self._alarm.clear()
            try:
                await asyncio.wait_for(self._alarm.wait(), self._wakes_at - now)
            except TimeoutError:
                pass
            if self._board is not None:
                self._tick()

    def _tick(self) -> None:
        try:
            self.apply(lambda board, now: board.tick(now))
        except Exception:
            log.exception("due work of the board failed; trying again")

    # The disk

    async def _write(self) -> None:
        if changes := self.board.take_changes():
            await self._store.write(lambda connection: save_changes(connection, changes))

    def _on_failure(self, error: BaseException) -> None:
        log.error("episodes could not be saved; reading them from disk again", error=str(error))
        self._open_calls = self.board.open_calls()
        self._board = None
        self._reloading = asyncio.create_task(self._reload(), name="episodes reload")

    async def _reload(self) -> None:
        while self._board is None:
            await asyncio.sleep(RELOAD_S)
            try:
                self._restore(await self._store.read(load_all))
            except Exception:
                log.exception("episodes cannot be read from disk; trying again")
        self.apply(lambda _board, _now: self.on_claimable(lambda _owner: True))
        self.on_restored()

    def _restore(self, saved: SavedRows) -> None:
        self.clock.begin_after(max((_last_change(row) for row in saved.episodes), default=0.0))
        now, limits = self.clock.now(), _limits(self.config)
        with _no_collection():
            board = EpisodeBoard.restore(saved, now, limits=limits, salt=self._salt, open_calls=self._open_calls)
        self.keys.clear()
        for row in saved.episodes:
            for number in range(1, row.attempt + 1):
                self.keys.void(AttemptRef(row.owner, row.episode_id, number))
        committed = sorted((one for one in saved.tombstones if one.attempt > 0), key=lambda one: one.until)
        for one in committed[-MAX_VOID:]:
            self.keys.void(AttemptRef(one.owner, one.name, one.attempt))
        for lease in board.leases():
            self.keys.open(AttemptRef(lease.owner, lease.ref.episode_id, lease.ref.attempt))
        self._board = board
        self._pass_on(board)
        if saved.runs:
            counts = {"runs": len(saved.runs), "groups": len(saved.groups), "episodes": len(saved.episodes)}
            log.info("episodes read from disk", **counts, leases=len(board.leases()))


@dataclass(frozen=True, slots=True)
class _Done(Generic[T]):
    value: T


def _next(board: EpisodeBoard, begun_on: EpisodeBoard, parts: Parts[T]) -> _Done[T] | None:
    if board is not begun_on:
        raise NotSaved
    try:
        next(parts)
    except StopIteration as end:
        return _Done(end.value)
    return None


class BoardRefusal(Refusal):
    """A refusal of the board, to be sent to a client."""

    def __init__(self, error: BoardError):
        super().__init__(error.status, error.detail, retry_after_s=error.retry_after_s)
        self.code = error.code


@contextmanager
def _no_collection() -> Iterator[None]:
    """Turns the garbage collector off while a million objects are made: none is garbage, and searching takes longer
    than making them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _last_change(row: EpisodeRow) -> float:
    return max(row.created_at, row.claimed_at or 0.0, row.ended_at or 0.0)


def _limits(config: EpisodesConfig) -> EpisodeLimits:
    return EpisodeLimits(
        min_lease_s=config.min_lease_s,
        max_lease_s=config.max_lease_s,
        max_open_leases=config.max_leases,
        max_runs=config.max_runs,
        max_task_bytes=config.max_task_bytes,
        max_result_bytes=config.max_result_bytes,
        remember_s=config.keep_ended_s,
    )
