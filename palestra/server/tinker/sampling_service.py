"""What the sampling calls of Tinker mean. Every lookup is by owner: what belongs to another does not exist."""

from __future__ import annotations

import secrets
import time

from palestra.server.core.callers import Caller
from palestra.server.core.errors import Refusal
from palestra.server.core.futures import RequestKind
from palestra.server.core.paths import SamplerId, TinkerPath
from palestra.server.core.sampling import Completions, Sampler
from palestra.server.core.workers import Worker
from palestra.server.hub import Hub, weights_of
from palestra.server.tinker import schemas as s
from palestra.server.tinker.common import Common, is_over
from palestra.server.tinker.decode import SampleCall
from palestra.server.tinker.schemas_rest import SamplerResponse
from palestra.store import samplers as sampler_rows
from palestra.store.records import Sampler as SamplerRow
from palestra.types.engine import Failure, Sampled, SavedAdapter, decode_from_worker

MAX_DIRECT = 256
MAX_CLONES = 4096


class SamplingService(Common):
    def __init__(self, hub: Hub):
        super().__init__(hub)
        self._direct: dict[tuple[str, str, str | None], Sampler] = {}
        """For requests without a sampling session: by owner, base model and checkpoint folder."""

    async def create_sampling_session(self, caller: Caller, request: s.CreateSamplingSessionRequest) -> str:
        session = self._session(caller, request.session_id)
        sampler_id = str(SamplerId(session.session_id, request.sampling_session_seq_id))
        base_model, folder = request.base_model, None
        if request.model_path is not None:
            checkpoint = await self.hub.checkpoints.find(TinkerPath.parse(request.model_path), caller.owner)
            base_model, folder = checkpoint.base_model, checkpoint.folder
        worker = self._base(base_model or "")
        row = SamplerRow(
            sampler_id=sampler_id,
            session_id=session.session_id,
            owner=caller.owner,
            base_model=base_model or "",
            created_at=time.time(),
            model_path=request.model_path,
            folder=folder,
        )
        stored = await self.hub.store.write(lambda c: sampler_rows.insert_sampler(c, row))
        if (stored.base_model, stored.model_path, stored.model_id) != (row.base_model, row.model_path, None):
            raise Refusal(400, f"sampling session {sampler_id} exists already, for other weights")
        await self._remember(stored, worker)
        return sampler_id

    async def _remember(self, row: SamplerRow, worker: Worker) -> Sampler:
        if row.session_id not in self.hub.sessions.active:  # it ended while the row was written
            await self.hub.store.write(lambda c: sampler_rows.drop_samplers(c, [row.sampler_id]))
            raise is_over(row.session_id)
        weights = weights_of(row.sampler_id, row.model_id, row.seq_id, row.folder)
        sampler = Sampler(row.sampler_id, row.session_id, row.owner, row.base_model, weights, worker, row.model_path)
        if isinstance(weights, SavedAdapter):
            self._runner(worker).prepare(weights)
        return self.hub.sampling.samplers.setdefault(row.sampler_id, sampler)

    def join(self, caller: Caller, sampler_id: str) -> int:
        sampler = self._sampler(caller, sampler_id)
        sampler.clones += 1
        return sampler.clones

    def sampler_info(self, caller: Caller, sampler_id: str) -> SamplerResponse:
        sampler = self._sampler(caller, sampler_id)
        return SamplerResponse(sampler_id=sampler_id, base_model=sampler.base_model, model_path=sampler.model_path)

    async def sample(self, caller: Caller, call: SampleCall) -> s.FutureResponse:
        if self.hub.is_leaving:
            raise Refusal(503, "the server is being stopped", retry_after_s=2.0)
        sampler, seq_id = await self._sampler_of(caller, call)
        future = self.hub.sampling.submit(sampler, seq_id, call.request, stream=call.stream)
        self.hub.metrics.submitted(RequestKind.SAMPLE, base_model=sampler.worker.name)
        return s.FutureResponse(request_id=future.request_id, sample_sequence_ids=future.sequence_ids)

    async def _sampler_of(self, caller: Caller, call: SampleCall) -> tuple[Sampler, int]:
        """By its session; older SDKs name the weights in each request instead."""
        if call.sampling_session_id is not None:
            sampler = self._sampler(caller, call.sampling_session_id)
            self._alive(sampler.session_id)
            return sampler, call.seq_id if call.seq_id is not None else next(sampler.own_numbers)
        folder, base_model = None, call.base_model
        if call.model_path is not None:
            checkpoint = await self.hub.checkpoints.find(TinkerPath.parse(call.model_path), caller.owner)
            folder, base_model = checkpoint.folder, checkpoint.base_model
        if base_model is None:
            raise Refusal(400, "send sampling_session_id, or base_model or model_path")
        key = (caller.owner, base_model, folder)
        if key not in self._direct:
            self._forget_idle()
            sampler_id = str(SamplerId(f"direct-{secrets.token_hex(8)}", len(self._direct)))
            weights = weights_of(sampler_id, None, None, folder)
            sampler = Sampler(sampler_id, "", caller.owner, base_model, weights, self._base(base_model))
            self._direct[key] = self.hub.sampling.samplers[sampler_id] = sampler
        return self._direct[key], next(self._direct[key].own_numbers)

    def _forget_idle(self) -> None:
        """Of those without a session, for which nobody says when they are over."""
        idle = [k for k, sampler in self._direct.items() if not sampler.futures]
        for key in idle[: max(0, len(self._direct) - MAX_DIRECT)]:
            self.hub.sampling.drop([self._direct.pop(key)], "")

    # Many results at once

    async def retrieve_many(self, caller: Caller, request: s.RetrieveFuturesRequest) -> s.RetrieveFuturesResponse:
        """The completions after the cursor; waits for the first one."""
        sampler = self._sampler(caller, request.target.sampling_session_id)
        if len(sampler.completions) >= MAX_CLONES and request.target.cloned_sampler_id not in sampler.completions:
            raise Refusal(400, f"{sampler.sampler_id} has {MAX_CLONES} clones already; make a new sampling client")
        queue = sampler.completions.setdefault(request.target.cloned_sampler_id, Completions())
        queue.forget(request.prev_cursor)
        for request_id in request.retrieved_request_ids:
            future = self.hub.sampling.futures.get(request_id)
            if future is not None and future.owner == caller.owner:
                future.retrieved = True
        hold_s = self.hub.config.poll_hold_s
        await queue.wait(request.prev_cursor, hold_s if request.timeout is None else min(hold_s, request.timeout))
        if not queue.after(request.prev_cursor) and not sampler.worker.link.is_up:
            self._why_down(sampler.worker)
        completions = [self._completion(request_id) for request_id in queue.after(request.prev_cursor)]
        return s.RetrieveFuturesResponse(completions=completions, cursor=queue.cursor)

    def _completion(self, request_id: str) -> s.Completion:
        future = self.hub.sampling.futures.get(request_id)
        message = decode_from_worker(future.frame) if future is not None and future.frame is not None else None
        if not isinstance(message, Sampled) or isinstance(message.outcome, Failure):
            return s.Completion(state="failed", request_id=request_id)
        size = len(future.frame) if future is not None and future.frame is not None else 0
        return s.Completion(state="finished", request_id=request_id, response_payload_uncompressed_size=size)

    def cancel(self, caller: Caller, request_id: str) -> None:
        future = self.hub.sampling.futures.get(request_id)
        if future is not None and future.owner == caller.owner:
            self.hub.sampling.cancel(future)
