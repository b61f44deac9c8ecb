"""A running sample of the engine: waited for or streamed, and cancelled when no client needs it any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from palestra.server.broker.model_calls import EpisodeCalls
from palestra.server.core.errors import ApiError, Refusal
from palestra.server.core.futures import SampleFuture
from palestra.server.core.owners.callers import Caller
from palestra.server.core.samples.requests import SamplingRequests
from palestra.server.core.samples.samplers import SampleCall, SamplingSessions
from palestra.server.core.samples.weights_changes import changes_of
from palestra.server.core.shutdown import Shutdown
from palestra.server.model_api.model_resolver import SamplingTarget, weights_name
from palestra.store.queries.traces import CallSegment
from palestra.types import Grammar, SampleRequest, SampleResult
from palestra.types.engine import Blame, EngineFailure, Sampled, StreamedTokens, decode_from_worker
from palestra.types.sampling import StopReason, WeightsChange

T = TypeVar("T")

WAIT_S = 60.0  # only the interval at which it checks again


@dataclass(frozen=True, slots=True)
class SampleOutcome:
    result: SampleResult
    compute_s: float
    segments: list[list[CallSegment]] = field(default_factory=list)
    """Where newer weights took over, for each sequence; empty if none did."""


class RunningSample:
    def __init__(
        self,
        future: SampleFuture,
        weights: str,
        grammar: Grammar | None,
        shutdown: Shutdown,
        segment: Callable[[WeightsChange], CallSegment],
    ):
        """`segment` says what is known of weights that took over."""
        self._future, self._shutdown, self._segment = future, shutdown, segment
        self.weights = weights
        """The exact weights that are sampled from."""
        self._grammar = grammar
        self._received: list[StreamedTokens | None] = []
        """Received by `begun`, and not yet yielded by `parts`."""

    async def begun(self) -> None:
        """Waits for the first part of a stream. A refusal of the engine is raised here, when nothing was sent yet."""
        self._received.append(await self._next())
        if self._received == [None]:
            self._refuse_when_stopping()
            await self.outcome()

    async def parts(self) -> AsyncIterator[StreamedTokens]:
        """Yields parts of a stream as it is sampled, up to its end."""
        while (part := await self._next()) is not None:
            yield part
        self._refuse_when_stopping()

    async def _next(self) -> StreamedTokens | None:
        assert self._future.parts is not None
        return self._received.pop() if self._received else await self._future.parts.get()

    async def outcome(self) -> SampleOutcome:
        while not await self._future.wait(WAIT_S):
            self._refuse_when_stopping()
        assert self._future.frame is not None
        message = decode_from_worker(self._future.frame)
        assert isinstance(message, Sampled)
        if isinstance(message.outcome, EngineFailure):
            raise _failed(message.outcome, self._grammar)
        if any(s.stop_reason is StopReason.ABORT for s in message.outcome.sequences):
            raise ApiError(503, "the sampling was interrupted; send the request again", retry_after_s=1.0)
        changes = changes_of(message, self._future.sampler_id)
        segments = [[self._segment(change) for change in own] for own in changes] if any(changes) else []
        return SampleOutcome(message.outcome, message.compute_s, segments)

    def _refuse_when_stopping(self) -> None:
        if self._shutdown.has_begun and not self._future.is_done:
            raise ApiError(503, "the server is being stopped", retry_after_s=2.0)


class EngineSampler:
    def __init__(self, sampling: SamplingRequests, samplers: SamplingSessions, calls: EpisodeCalls, shutdown: Shutdown):
        self._sampling, self._samplers, self._calls, self._shutdown = sampling, samplers, calls, shutdown

    @asynccontextmanager
    async def run(
        self, caller: Caller, target: SamplingTarget, request: SampleRequest, *, stream: bool = False
    ) -> AsyncIterator[RunningSample]:
        """Runs a sample; if the block is left before its end, the sample is cancelled."""
        call = SampleCall(
            request, target.sampling_session_id, None, target.base_model, target.model_path, stream=stream
        )
        sampling = self._sampling
        try:
            future = await self._samplers.sample(caller, call)
            try:
                with self._calls.aborting(caller, lambda: sampling.cancel(future)):
                    weights = weights_name(sampling.samplers[future.sampler_id])
                    segment = partial(self._segment, caller)
                    yield RunningSample(future, weights, request.grammar, self._shutdown, segment)
            finally:
                sampling.cancel(future)  # does nothing if it is done
                sampling.forget(future)
        except Refusal:
            if target.alias is not None and target.sampling_session_id not in (None, *sampling.samplers):
                # A run ended and its sampling session with it. Its alias points at a checkpoint by now, or is reported
                # as missing.
                raise ApiError(
                    503, f"{target.name} was moved to other weights; send the request again", retry_after_s=1.0
                ) from None
            raise

    def _segment(self, caller: Caller, change: WeightsChange) -> CallSegment:
        sampler = self._sampling.samplers.get(change.weights)
        version = None if caller.attempt is None else self._calls.version_of(caller.attempt, change.weights)
        return CallSegment(
            start=change.start,
            weights=change.weights if sampler is None else weights_name(sampler),
            version=version,
            is_exact=change.is_exact,
        )


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of all; if one fails, the others are cancelled."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _failed(failure: EngineFailure, grammar: Grammar | None) -> ApiError:
    """Returns the error of a failed sample: permanent if the request caused it, retryable if the engine did."""
    if failure.blame is Blame.USER:
        asked_by = "" if grammar is None else grammar.asked_by
        is_about_it = asked_by and failure.message.startswith(f"{asked_by}: ")
        return ApiError(400, failure.message, param=asked_by if is_about_it else None)
    return ApiError(500, failure.message)
