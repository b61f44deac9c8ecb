"""One sample of the engine, waited for; given up when its client leaves.

Owns: submitting, waiting, cancelling, scores of what was sampled. Never touches: text, traces.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from palestra.server.auth import Caller
from palestra.server.futures import SampleFuture
from palestra.server.hub import Hub
from palestra.server.openai.errors import ApiError, no_model
from palestra.server.openai.models import Target, weights_name
from palestra.server.sampling import CLONE_STRIDE
from palestra.server.tinker.decode import SampleCall
from palestra.server.tinker.sampling_service import SamplingService
from palestra.types import SampleRequest, SampleResult, SamplingParams
from palestra.types.engine import Blame, Failure, Sampled, decode_from_worker
from palestra.types.sampling import SampledSequence, StopReason, TopLogprobs

T = TypeVar("T")

FIRST_NUMBER = (1 << 32) * CLONE_STRIDE  # of a sampling session's samples: its SDK clients count from below
WAIT_S = 60.0  # then it looks again; nothing depends on it


@dataclass(frozen=True, slots=True)
class Scores:
    """Of sampled tokens, by the model itself."""

    logprobs: list[float]
    top: list[TopLogprobs]


@dataclass(frozen=True, slots=True)
class Outcome:
    result: SampleResult
    weights: str
    compute_s: float


class Runner:
    def __init__(self, hub: Hub, tinker: SamplingService):
        self._hub, self._tinker = hub, tinker
        self._numbers = itertools.count(FIRST_NUMBER)

    async def sample(self, caller: Caller, target: Target, request: SampleRequest) -> Outcome:
        """Cancelled, it takes the sample back from the engine."""
        future = await self._submit(caller, target, request)
        sampler = self._hub.sampling.samplers[future.sampler_id]
        try:
            while not await future.wait(WAIT_S):
                if self._hub.is_leaving:
                    raise ApiError(503, "the server is being stopped", retry_after_s=2.0)
        except BaseException:
            self._hub.sampling.cancel(future)
            raise
        finally:
            future.retrieved = True
        assert future.frame is not None
        message = decode_from_worker(future.frame)
        assert isinstance(message, Sampled)
        if isinstance(message.outcome, Failure):
            raise _failed(message.outcome)
        if any(s.stop_reason is StopReason.ABORT for s in message.outcome.sequences):
            raise ApiError(503, "the sampling was interrupted; send it again", retry_after_s=1.0)
        return Outcome(message.outcome, weights_name(sampler), message.compute_s)

    async def score(
        self, caller: Caller, target: Target, prompt: tuple[int, ...], sequence: SampledSequence, top: int
    ) -> Scores:
        """The prompt comes from the cache: this costs one pass over what was sampled."""
        count = len(sequence.tokens)
        request = SampleRequest(
            prompt=(*prompt, *sequence.tokens),
            params=SamplingParams(max_tokens=1, temperature=0.0),
            prompt_logprobs=True,
            topk_prompt_logprobs=top,
            prompt_logprobs_last_n=count,
        )
        result = (await self.sample(caller, target, request)).result
        logprobs = [value or 0.0 for value in (result.prompt_logprobs or [])[-count:]]
        return Scores(logprobs, [row for row in (result.topk_prompt_logprobs or [])[-count:] if row is not None])

    async def _submit(self, caller: Caller, target: Target, request: SampleRequest) -> SampleFuture:
        number = None
        if target.sampling_session_id is not None:
            sampler = self._hub.sampling.samplers.get(target.sampling_session_id)
            if sampler is None:  # its session ended meanwhile
                raise no_model(target.name, list(self._hub.workers))
            number = next(n for n in self._numbers if n not in sampler.futures)
        call = SampleCall(request, target.sampling_session_id, number, target.base_model, target.model_path)
        accepted = await self._tinker.sample(caller, call)
        return self._hub.sampling.futures[accepted.request_id]


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results; when one fails, the others are given up."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Gives the work up when the client leaves. The body has been read."""
    task, left = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        left.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _failed(failure: Failure) -> ApiError:
    """A request's own fault is permanent; the engine's may pass."""
    if failure.blame is Blame.USER:
        return ApiError(400, failure.message)
    return ApiError(500, failure.message)
