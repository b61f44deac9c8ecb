"""The meaning of Tinker's sampling calls. Every lookup is by owner: what belongs to another owner does not exist."""

from __future__ import annotations

import time

from palestra.server.core.checkpoints.files import CheckpointFiles
from palestra.server.core.errors import Refusal
from palestra.server.core.lookup import Lookup
from palestra.server.core.owners.callers import Caller
from palestra.server.core.paths import SamplerId, TinkerPath
from palestra.server.core.samples.requests import SamplingRequests
from palestra.server.core.samples.samplers import SampleCall, SamplingSessions
from palestra.server.tinker import schemas as s
from palestra.server.tinker.schemas_rest import SamplerResponse
from palestra.store.records import SamplerRow as SamplerRow


class SamplingService:
    def __init__(
        self,
        lookup: Lookup,
        sampling: SamplingRequests,
        samplers: SamplingSessions,
        checkpoints: CheckpointFiles,
    ):
        self._lookup, self._sampling, self._samplers = lookup, sampling, samplers
        self._checkpoints = checkpoints

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
