"""The meaning of requests for results: of one call by its id, or of all samples of a sampler that are done.

A client that polls `retrieve_futures` names no samples: whatever a restart may lose must be in a number block before it
is acknowledged.
"""

from __future__ import annotations

import asyncio

from palestra.server.core.errors import Refusal, not_found
from palestra.server.core.futures import RequestKind, SampleFuture, TrainFuture
from palestra.server.core.lookup import Lookup, why_down
from palestra.server.core.owners.callers import Caller
from palestra.server.core.paths import SampleRequestId, parse_request_id
from palestra.server.core.samples.requests import SamplingRequests
from palestra.server.core.shutdown import Shutdown
from palestra.server.core.telemetry.metrics import Metrics
from palestra.server.core.training.requests import TrainingRequests
from palestra.server.tinker import encode
from palestra.server.tinker import schemas as s
from palestra.types.engine import EngineFailure, PassResult, Sampled, Saved, StepDone, decode_from_worker
from palestra.util.json_types import JsonObject

MAX_CLONES = 4096
GATHER_S = 0.01  # results that arrive meanwhile are in the same answer; a lone sample's is not delayed

Answer = JsonObject | bytes | s.TryAgainResponse


class ResultService:
    def __init__(
        self,
        lookup: Lookup,
        training: TrainingRequests,
        sampling: SamplingRequests,
        metrics: Metrics,
        shutdown: Shutdown,
    ):
        self._lookup, self._training, self._sampling = lookup, training, sampling
        self._metrics, self._shutdown = metrics, shutdown

    async def retrieve(self, caller: Caller, request_id: str, *, as_protobuf: bool) -> Answer:
        future = self._future(caller, request_id)
        if not await future.wait(self._shutdown.poll_hold_s):
            return self._not_yet(future)
        if isinstance(future, SampleFuture):
            future.note_read()
            assert future.frame is not None
            message = decode_from_worker(future.frame)
            assert isinstance(message, Sampled)
            if isinstance(message.outcome, EngineFailure):
                return encode.failure_json(message.outcome)
            return encode.sample_protobuf(message.outcome) if as_protobuf else encode.sample_json(message.outcome)
        outcome = self._training.outcome(future)
        match outcome:
            case EngineFailure():
                return encode.failure_json(outcome)
            case PassResult():
                return encode.pass_protobuf(outcome) if as_protobuf else encode.pass_json(outcome)
            case StepDone():
                return encode.step_json(outcome)
            case Saved() if future.kind is RequestKind.SAVE_WEIGHTS_EXTERNAL:
                return {**future.reply, "size_bytes": outcome.size_bytes}
            case _:
                return future.reply

    async def retrieve_many(self, caller: Caller, request: s.RetrieveFuturesRequest) -> s.RetrieveFuturesResponse:
        """Returns the completions after the cursor; waits for the first one."""
        sampler, clone = (
            self._lookup.sampler(caller, request.target.sampling_session_id),
            request.target.cloned_sampler_id,
        )
        if len(sampler.completions) >= MAX_CLONES and clone not in sampler.completions:
            raise Refusal(400, f"{sampler.sampler_id} already has {MAX_CLONES} clones; make a new sampling client")
        queue, cursor = self._sampling.completions(sampler, clone), request.prev_cursor
        queue.forget(cursor)
        self._sampling.confirm(caller.owner, request.retrieved_request_ids)
        if not queue.has_after(cursor):
            hold_s = self._shutdown.poll_hold_s
            await queue.wait(cursor, hold_s if request.timeout is None else min(hold_s, request.timeout))
            if sampler.pending and queue.has_after(cursor):
                await asyncio.sleep(GATHER_S)
        found, cursor = queue.after(cursor)
        if not found and not sampler.worker.link.is_up and sampler.worker.cannot_start:
            # Each of them is told why when its result is read; this poll itself must go on.
            found = [future.request_id for future in self._sampling.pending_of_clone(sampler, clone)]
        return s.RetrieveFuturesResponse(completions=[self._completion(one) for one in found], cursor=cursor)

    def cancel(self, caller: Caller, request_id: str) -> None:
        future = self._sampling.futures.get(request_id)
        if future is not None and future.owner == caller.owner:
            self._sampling.cancel(future)

    def _future(self, caller: Caller, request_id: str) -> TrainFuture | SampleFuture:
        future = self._training.futures.get(request_id) or self._sampling.futures.get(request_id)
        if future is not None and future.owner == caller.owner:
            return future
        known = parse_request_id(request_id)
        # a sample of another owner is reported as lost, like one that never existed
        if isinstance(known, SampleRequestId):
            sampler = self._sampling.samplers.get(known.sampler_id)
            self._metrics.sample_lost(sampler.worker.name if sampler else "")
            raise Refusal(410, "this sample was lost when the server restarted; send it again")
        lost = self._training.lost.message(known.model_id, owner=caller.owner) if known is not None else None
        raise not_found("request", request_id) if lost is None else Refusal(404, lost)

    def _not_yet(self, future: TrainFuture | SampleFuture) -> s.TryAgainResponse:
        paused = None
        if self._shutdown.has_begun:
            paused = "the server is being stopped; the request continues when it is back"
        else:
            of = self._training.models if isinstance(future, TrainFuture) else self._sampling.samplers
            owner = of.get(future.model_id if isinstance(future, TrainFuture) else future.sampler_id)
            if owner is not None and not owner.worker.link.is_up:
                paused = why_down(owner.worker)
        return s.TryAgainResponse(
            request_id=future.request_id,
            queue_state="paused_capacity" if paused else "active",
            queue_state_reason=paused,
        )

    def _completion(self, request_id: str) -> s.FutureCompletion:
        future = self._sampling.futures.get(request_id)
        if future is None or future.frame is None or future.is_failed:
            return s.FutureCompletion(state="failed", request_id=request_id)
        size = len(future.frame)
        return s.FutureCompletion(state="finished", request_id=request_id, response_payload_uncompressed_size=size)
