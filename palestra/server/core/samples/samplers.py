"""Samplers: those of a sampling session, or of weights that a request names itself.

Owns: making them, choosing one for a request. Never touches: the order of samples (`requests`), HTTP.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace

from palestra.server.core.checkpoints.files import CheckpointFiles
from palestra.server.core.errors import Refusal
from palestra.server.core.futures import RequestKind, SampleFuture
from palestra.server.core.lookup import Lookup, is_over
from palestra.server.core.owners.callers import Caller
from palestra.server.core.paths import SamplerId, TinkerPath
from palestra.server.core.pictures.locations import PictureError
from palestra.server.core.pictures.reader import PictureReader
from palestra.server.core.pictures.requests import Files, placed, vision_card
from palestra.server.core.samples.requests import FIRST_OWN, SamplingRequests, SamplingSession, weights_of
from palestra.server.core.sessions import TinkerSessions
from palestra.server.core.telemetry.metrics import Metrics
from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.store import Store
from palestra.store.queries import samplers as sampler_rows
from palestra.store.records import SamplerRow as SamplerRow
from palestra.types import SampleRequest
from palestra.types.engine import SavedAdapter

MAX_DIRECT = 256


@dataclass(frozen=True, slots=True)
class SampleCall:
    """What to sample from: a sampling session and a number in it; or a base model or a path."""

    request: SampleRequest
    sampling_session_id: str | None
    seq_id: int | None
    """Set whenever an SDK sets `sampling_session_id`."""
    base_model: str | None
    model_path: str | None
    stream: bool = False
    files: Files = field(default_factory=dict)
    """Pictures, by the names that stand in `request.images` in place of digests; those do not take positions yet."""


class SamplingSessions:
    def __init__(
        self,
        store: Store,
        lookup: Lookup,
        sessions: TinkerSessions,
        sampling: SamplingRequests,
        checkpoints: CheckpointFiles,
        metrics: Metrics,
        pictures: PictureReader,
    ):
        self._store, self._lookup, self._sessions, self._sampling = store, lookup, sessions, sampling
        self._checkpoints, self._metrics, self._pictures = checkpoints, metrics, pictures
        self._direct: dict[tuple[str, str, str | None], SamplingSession] = {}
        """Samplers for requests without a sampling session, by owner, base model and checkpoint folder."""

    async def insert(self, row: SamplerRow) -> SamplerRow:
        """Stores a sampler and returns the stored row: another one, if its id was taken."""
        return await self._store.write(lambda c: sampler_rows.insert_sampler(c, row))

    async def add(self, row: SamplerRow, worker: WorkerSupervisor) -> SamplingSession:
        if row.session_id not in self._sessions.active:  # it ended while the row was written
            await self._store.write(lambda c: sampler_rows.drop_samplers(c, [row.sampler_id]))
            raise is_over(row.session_id)
        weights = weights_of(row.sampler_id, row.model_id, row.seq_id, row.folder)
        sampler = SamplingSession(
            row.sampler_id, row.session_id, row.owner, row.base_model, weights, worker, row.model_path
        )
        if isinstance(weights, SavedAdapter):
            self._sampling.runners[worker].prepare(weights)
        return self._sampling.samplers.setdefault(row.sampler_id, sampler)

    async def sample(self, caller: Caller, call: SampleCall) -> SampleFuture:
        self._lookup.refuse_when_stopping()
        sampler, seq_id = await self._sampler_of(caller, call)
        if call.files:
            call = await self._with_pictures(sampler, call)
        if seq_id < FIRST_OWN:
            await self._sampling.reserve(self._store, sampler, seq_id)
        future = self._sampling.submit(sampler, seq_id, call.request, stream=call.stream)
        self._metrics.submitted(RequestKind.SAMPLE, base_model=sampler.worker.name)
        return future

    async def _with_pictures(self, sampler: SamplingSession, call: SampleCall) -> SampleCall:
        card = vision_card(sampler.worker)
        try:
            request = await placed(sampler.owner, call.request, call.files, self._pictures, card)
        except PictureError as e:
            raise Refusal(400, f"prompt: {e}") from None
        return replace(call, request=request, files={})

    async def _sampler_of(self, caller: Caller, call: SampleCall) -> tuple[SamplingSession, int]:
        if call.sampling_session_id is not None:
            sampler = self._lookup.sampler(caller, call.sampling_session_id)
            self._lookup.keep_alive(sampler.session_id)
            return sampler, call.seq_id if call.seq_id is not None else next(sampler.own_numbers)
        folder, base_model = None, call.base_model
        if call.model_path is not None:
            checkpoint = await self._checkpoints.open(TinkerPath.parse(call.model_path), caller.owner)
            folder, base_model = checkpoint.folder, checkpoint.base_model
        if base_model is None:
            raise Refusal(400, "send one of sampling_session_id, base_model and model_path")
        key = (caller.owner, base_model, folder)
        if key not in self._direct:
            self._forget_idle()
            sampler_id = str(SamplerId(f"direct-{secrets.token_hex(8)}", len(self._direct)))
            weights = weights_of(sampler_id, None, None, folder)
            worker = self._lookup.base(base_model)
            sampler = SamplingSession(sampler_id, "", caller.owner, base_model, weights, worker, call.model_path)
            self._direct[key] = self._sampling.samplers[sampler_id] = sampler
        return self._direct[key], next(self._direct[key].own_numbers)

    def _forget_idle(self) -> None:
        """Drops samplers without a session that were not used for long, because clients do not say when they are done
        with them."""
        idle = [k for k, sampler in self._direct.items() if not sampler.futures]
        for key in idle[: max(0, len(self._direct) - MAX_DIRECT)]:
            self._sampling.drop([self._direct.pop(key)], "")
