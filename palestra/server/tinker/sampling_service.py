"""The meaning of Tinker's sampling calls. Every lookup is by owner: what belongs to another owner does not exist.

A client that polls `retrieve_futures` names no samples: whatever a restart may lose must be in a number block before it
is acknowledged.
"""

from __future__ import annotations

import asyncio
import time

from palestra.server.core.checkpoints.files import CheckpointFiles
from palestra.server.core.errors import Refusal
from palestra.server.core.lookup import Lookup
from palestra.server.core.owners.callers import Caller
from palestra.server.core.paths import SamplerId, TinkerPath
from palestra.server.core.samples.requests import SamplingRequests
from palestra.server.core.samples.samplers import SampleCall, SamplingSessions
from palestra.server.core.shutdown import Shutdown
from palestra.server.tinker import schemas as s
from palestra.server.tinker.schemas_rest import SamplerResponse
from palestra.store.records import SamplerRow as SamplerRow

MAX_CLONES = 4096
GATHER_S = 0.01  # results that arrive meanwhile are in the same answer; a lone sample's is not delayed


class SamplingService:
    def __init__(
        self,
        lookup: Lookup,
        sampling: SamplingRequests,
        samplers: SamplingSessions,
        checkpoints: CheckpointFiles,
        shutdown: Shutdown,
    ):
        self._lookup, self._sampling, self._samplers = lookup, sampling, samplers
        self._checkpoints, self._shutdown = checkpoints, shutdown

    async def create_sampling_session(self, caller: Caller, request: s.CreateSamplingSessionRequest) -> str:
        session = self._lookup.session(caller, request.session_id)
        sampler_id = str(SamplerId(session.session_id, request.sampling_session_seq_id))
        base_model, folder = request.base_model, None
        if request.model_path is not None:
            checkpoint = await self._checkpoints.open(TinkerPath.parse(request.model_path), caller.owner)
            base_model, folder = checkpoint.base_model, checkpoint.folder
        worker = self._lookup.base(base_model or "")
        row = SamplerRow(
            sampler_id=sampler_id,
            session_id=session.session_id,
            owner=caller.owner,
            base_model=base_model or "",
            created_at=time.time(),
            model_path=request.model_path,
            folder=folder,
        )
        stored = await self._samplers.insert(row)
        if (stored.base_model, stored.model_path, stored.model_id) != (row.base_model, row.model_path, None):
            raise Refusal(400, f"sampling session {sampler_id} already exists with other weights")
        await self._samplers.add(stored, worker)
        return sampler_id

    def join(self, caller: Caller, sampler_id: str) -> int:
        sampler = self._lookup.sampler(caller, sampler_id)
        sampler.clones += 1
        return sampler.clones

    def sampler_info(self, caller: Caller, sampler_id: str) -> SamplerResponse:
        sampler = self._lookup.sampler(caller, sampler_id)
        return SamplerResponse(sampler_id=sampler_id, base_model=sampler.base_model, model_path=sampler.model_path)

    async def sample(self, caller: Caller, call: SampleCall) -> s.FutureResponse:
        future = await self._samplers.sample(caller, call)
        return s.FutureResponse(request_id=future.request_id, sample_sequence_ids=future.sequence_ids)

    # Other weights for samples under way

    def continue_samples(self, caller: Caller, request: s.ContinueSamplesRequest) -> s.ContinueSamplesResponse:
        to = self._lookup.sampler(caller, request.to)
        known = [self._sampling.samplers.get(one) for one in request.sampling_session_ids if one != request.to]
        own = [sampler for sampler in known if sampler is not None and sampler.owner == caller.owner]
        return s.ContinueSamplesResponse(changed=self._sampling.change_weights(own, to, keeps_keys=request.keep_keys))

    def sequence_weights(self, caller: Caller, request: s.SequenceWeightsRequest) -> s.SequenceWeightsResponse:
        found = {one: self._sampling.changes.find(caller.owner, one) for one in request.sequence_ids}
        return s.SequenceWeightsResponse(
            sequences={
                one: [
                    s.WeightsChangeBody(start=c.start, sampling_session_id=c.weights, is_exact=c.is_exact)
                    for c in changes
                ]
                for one, changes in found.items()
                if changes
            }
        )

    def load(self, base_model: str) -> s.SamplingLoadResponse:
        load = self._sampling.runners[self._lookup.base(base_model)].load
        return s.SamplingLoadResponse(
            waiting=load.waiting, running=load.running, kv_used=load.kv_used, cache_tokens=load.cache_tokens
        )

    # Many results at once

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

    def _completion(self, request_id: str) -> s.FutureCompletion:
        future = self._sampling.futures.get(request_id)
        if future is None or future.frame is None or future.is_failed:
            return s.FutureCompletion(state="failed", request_id=request_id)
        size = len(future.frame)
        return s.FutureCompletion(state="finished", request_id=request_id, response_payload_uncompressed_size=size)

    def cancel(self, caller: Caller, request_id: str) -> None:
        future = self._sampling.futures.get(request_id)
        if future is not None and future.owner == caller.owner:
            self._sampling.cancel(future)
