"""Model calls with an episode key: counted, sampled from the run's weights, and only while the attempt is valid."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from palestra.episodes.board_events import AdmittedCall
from palestra.episodes.errors import BoardError
from palestra.server.broker.broker import BoardRefusal, Broker
from palestra.server.core.errors import ApiError, Refusal
from palestra.server.core.owners.callers import AttemptRef, Caller
from palestra.store.queries.traces import TurnFacts
from palestra.types.episodes import EpisodeState

PAUSED, UNKNOWN = "paused", "unknown"


class EpisodeCalls:
    def __init__(self, broker: Broker):
        self._broker = broker
        self._aborts: dict[AttemptRef, list[Callable[[], None]]] = {}
        """Functions that cancel the samples under way, by attempt."""
        self.running: Counter[tuple[str, str]] = Counter()
        """Number of running calls by owner and run."""
        broker.on_over = self._abort

    @asynccontextmanager
    async def calling(self, attempt: AttemptRef, traceparent: str) -> AsyncIterator[AdmittedCall]:
        """Surrounds a call and its answer. The lease does not age meanwhile; at the end the call is durably counted."""
        began_at = self._broker.clock.now()
        try:
            async with self._calling(attempt) as call:
                yield call
        except BaseException as error:
            message = str(error) or type(error).__name__
            self._broker.observer.call_failed(attempt, traceparent, began_at, self._broker.clock.now(), message)
            raise

    @asynccontextmanager
    async def _calling(self, attempt: AttemptRef) -> AsyncIterator[AdmittedCall]:
        call = await self._admitted(attempt)
        noted, run = self._broker.saving.last, (attempt.owner, call.run)
        self.running[run] += 1
        try:
            yield call
            if noted is not None:
                await noted.saved()
        except Refusal:
            self.check(attempt)  # if the attempt is over, the call was cancelled because of that
            raise
        finally:
            self.running[run] -= 1
            self._broker.call_over(attempt)

    @contextmanager
    def aborting(self, caller: Caller, abort: Callable[[], None]) -> Iterator[None]:
        """Registers `abort` while something is sampled for the caller."""
        if caller.attempt is None:
            yield
            return
        self.check(caller.attempt)  # the attempt may be over since the call was admitted
        running = self._aborts.setdefault(caller.attempt, [])
        running.append(abort)
        try:
            yield
        finally:
            running.remove(abort)
            if not running:
                self._aborts.pop(caller.attempt, None)

    def check(self, attempt: AttemptRef) -> None:
        """Raises if the attempt is over: then nothing more is stored for it, because its trainer may have read it."""
        if not self._broker.keys.is_live(attempt):
            raise self._why_over(attempt)

    def is_live(self, attempt: AttemptRef) -> bool:
        return self._broker.keys.is_live(attempt)

    def sampled(self, attempt: AttemptRef, tokens: int) -> None:
        """Counts tokens that a live attempt has sampled. The count is saved with the next change, its end at the
        latest."""
        self._broker.board.sampled(attempt.ref, tokens)
        self._broker.observer.sampled(attempt.owner, self._run_of(attempt), tokens)

    def answered(self, caller: Caller, facts: TurnFacts, prompt_tokens: int, sampled_tokens: int) -> None:
        """Reports a call that was stored."""
        if caller.attempt is not None:
            self._broker.observer.called(caller.attempt, caller.traceparent, facts, prompt_tokens, sampled_tokens)

    def played_by(self, attempt: AttemptRef, run: str, engine: str) -> None:
        """Notes which engine answers an admitted call."""
        self.check(attempt)
        self._broker.board.note_engine(attempt.owner, run, engine)

    def model_of(self, attempt: AttemptRef) -> str | None:
        """Returns the model of the attempt's run."""
        self.check(attempt)
        return self._broker.board.run_info(attempt.owner, self._run_of(attempt)).model

    def version_of(self, attempt: AttemptRef, model: str) -> int | None:
        """Returns the version of a model that was published for the attempt's run; None if it is not known."""
        return self._broker.board.version_of(attempt.owner, self._run_of(attempt), model)

    async def _admitted(self, attempt: AttemptRef) -> AdmittedCall:
        broker, loop = self._broker, asyncio.get_running_loop()
        until = loop.time() + broker.config.hold_calls_s
        while True:
            self.check(attempt)
            try:
                return broker.apply(lambda board, now: board.note_call(attempt.owner, attempt.ref, now))
            except BoardRefusal as error:
                if error.code != PAUSED or loop.time() >= until or broker.is_stopping:
                    raise _error_text(error) from None
            await broker.is_resumed.wait((attempt.owner, self._run_of(attempt)), until - loop.time())

    def _run_of(self, attempt: AttemptRef) -> str:
        return self._broker.board.find(attempt.owner, attempt.episode_id).run

    def _why_over(self, attempt: AttemptRef) -> ApiError:
        try:
            info = self._broker.board.find(attempt.owner, attempt.episode_id)
            if info.state is EpisodeState.ENDED and info.attempt == attempt.attempt:
                return _void("has ended")
        except BoardError:
            pass  # committed, or deleted with its run
        try:
            self._broker.apply(lambda board, now: board.note_call(attempt.owner, attempt.ref, now))
        except BoardRefusal as error:
            return _void("is committed") if error.code == UNKNOWN else _error_text(error)
        raise AssertionError(f"the key of a running attempt is void: {attempt.origin}")

    def _abort(self, attempt: AttemptRef) -> None:
        for abort in self._aborts.pop(attempt, ()):
            abort()


def _void(what: str) -> ApiError:
    return ApiError(401, f"this key is void: its episode {what}; claim another one", code="invalid_api_key")


def _error_text(error: BoardRefusal) -> ApiError:
    """Returns the error for a client. Repeating a call helps while a run is paused, and never for a lost attempt."""
    return ApiError(
        error.status,
        error.detail,
        code=error.code or None,
        retry_after_s=error.retry_after_s,
        is_final=error.code != PAUSED,
    )
