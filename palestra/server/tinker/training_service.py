"""The meaning of calls that train a model: passes, optimizer steps, its weights saved and loaded."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec

from palestra.server.core.checkpoints.files import CheckpointFiles
from palestra.server.core.errors import Refusal
from palestra.server.core.futures import RequestKind
from palestra.server.core.lookup import Lookup
from palestra.server.core.owners.callers import Caller
from palestra.server.core.paths import SamplerId, TinkerPath, TrainRequestId, check_name
from palestra.server.core.pictures.locations import PictureError
from palestra.server.core.pictures.reader import PictureReader
from palestra.server.core.pictures.requests import first_datum_with, vision_card, with_pictures
from palestra.server.core.samples.requests import SamplingRequests
from palestra.server.core.samples.samplers import SamplingSessions
from palestra.server.core.training.models import TrackedModel
from palestra.server.core.training.requests import TrainingRequests
from palestra.server.core.training.routing_records import Scope
from palestra.server.core.workers.served_models import ServedModels
from palestra.server.tinker import encode
from palestra.server.tinker import schemas as s
from palestra.server.tinker.decode import PassRequest
from palestra.server.tinker.encode import accepted
from palestra.store.records import CheckpointKind, SamplerRow
from palestra.types import AdamParams
from palestra.types.engine import LoadWeights, OptimStep, Pass, SaveWeights
from palestra.util.json_types import JsonObject


class TrainingService:
    def __init__(
        self,
        lookup: Lookup,
        served: ServedModels,
        training: TrainingRequests,
        sampling: SamplingRequests,
        samplers: SamplingSessions,
        checkpoints: CheckpointFiles,
        pictures: PictureReader,
    ):
        self._lookup, self._served, self._training, self._sampling = lookup, served, training, sampling
        self._samplers, self._checkpoints, self._pictures = samplers, checkpoints, pictures

    async def run_pass(self, caller: Caller, request: PassRequest) -> s.FutureResponse:
        model = self._lookup.model(caller, request.model_id)
        if not request.operation.data:
            raise self._lookup.rejected(model, request.seq_id, "the batch is empty: send at least one datum")
        if request.files:
            request = await self._with_pictures(model, request)
        kind = RequestKind.FORWARD if request.operation.forward_only else RequestKind.FORWARD_BACKWARD
        completed = self._with_routing((caller.owner, model.worker.name), request)
        return accepted(await self._lookup.submit(model, request.seq_id, kind, request.operation, {}, completed))

    async def _with_pictures(self, model: TrackedModel, request: PassRequest) -> PassRequest:
        try:
            card = vision_card(model.worker)
            operation = await with_pictures(model.owner, request.operation, request.files, self._pictures, card)
        except PictureError as e:
            where = first_datum_with(request.operation, e.name)
            raise self._lookup.rejected(model, request.seq_id, f"data[{where}]: {e}") from None
        except Refusal as e:
            if e.status != 400:
                raise
            where = first_datum_with(request.operation)
            raise self._lookup.rejected(model, request.seq_id, f"data[{where}]: {e.detail}") from None
        return replace(request, operation=operation, files={})

    def _with_routing(self, scope: Scope, request: PassRequest) -> Pass | None:
        """Adds what was recorded while the data were sampled; None if nothing was."""
        found = [self._sampling.routing.find(scope, spans) for spans in request.spans]
        if not any(found):
            return None
        pairs = zip(request.operation.data, found, strict=True)
        data = [msgspec.structs.replace(datum, routing=routing) for datum, routing in pairs]
        return msgspec.structs.replace(request.operation, data=data)

    async def optim_step(self, caller: Caller, request: s.OptimStepRequest) -> s.FutureResponse:
        model = self._lookup.model(caller, request.model_id)
        if request.adam_params is None:
            name = request.optimizer_params.type if request.optimizer_params else ""
            raise self._lookup.rejected(
                model, request.seq_id, f"{name!r}: this model's optimizer is adamw; send adam_params"
            )
        operation = OptimStep(adam=AdamParams(**request.adam_params.model_dump()))
        return accepted(await self._lookup.submit(model, request.seq_id, RequestKind.OPTIM_STEP, operation, {}))

    async def save_weights(self, caller: Caller, request: s.SaveWeightsRequest) -> s.FutureResponse:
        model = self._lookup.model(caller, request.model_id)
        path = self._path(model, request.seq_id, CheckpointKind.WEIGHTS, request.path or f"{request.seq_id:06d}")
        reply = encode.saved_json(str(path))
        folder = await self._begin(
            model,
            path,
            request.seq_id,
            reply,
            ttl_s=request.ttl_seconds,
            overwrite=request.overwrite,
            user_metadata=request.user_metadata,
        )
        operation = SaveWeights(folder=folder, optimizer=True)
        return accepted(await self._lookup.submit(model, request.seq_id, RequestKind.SAVE_WEIGHTS, operation, reply))

    async def save_weights_for_sampler(
        self, caller: Caller, request: s.SaveWeightsForSamplerRequest
    ) -> s.FutureResponse:
        model, kind = self._lookup.model(caller, request.model_id), RequestKind.SAVE_WEIGHTS_FOR_SAMPLER
        if request.path is None:
            sampler_id = await self._keep(model, request.seq_id, request.sampling_session_seq_id or 0)
            operation, reply = (
                self._sampling.runners[model.worker].keeping(sampler_id),
                encode.kept_json(sampler_id),
            )
            return accepted(await self._lookup.submit(model, request.seq_id, kind, operation, reply))
        path = self._path(model, request.seq_id, CheckpointKind.SAMPLER, request.path)
        reply = encode.saved_for_sampler_json(str(path))
        folder = await self._begin(
            model, path, request.seq_id, reply, ttl_s=request.ttl_seconds, user_metadata=request.user_metadata
        )
        operation = SaveWeights(folder=folder, optimizer=False)
        return accepted(await self._lookup.submit(model, request.seq_id, kind, operation, reply))

    async def _keep(self, model: TrackedModel, seq_id: int, number: int) -> str:
        """A repeated request gets the sampler of the first time: the SDK counts on, and sends another number."""
        earlier = self._training.earlier_reply(model, seq_id) or {}
        sampler_id = earlier.get("sampling_session_id") or str(SamplerId(model.session_id, number))
        self._training.check_number(model, seq_id, encode.kept_json(sampler_id))
        row = SamplerRow(
            sampler_id=sampler_id,
            session_id=model.session_id,
            owner=model.owner,
            base_model=model.base_model,
            created_at=time.time(),
            model_id=model.model_id,
            seq_id=seq_id,
        )
        stored = await self._samplers.insert(row)
        if (stored.model_id, stored.seq_id) != (model.model_id, seq_id):
            raise self._lookup.rejected(model, seq_id, f"sampling session {stored.sampler_id} already exists")
        await self._samplers.add(stored, model.worker)
        return stored.sampler_id

    async def save_weights_external(self, caller: Caller, request: s.SaveWeightsExternalRequest) -> s.FutureResponse:
        model = self._lookup.model(caller, request.model_id)
        if request.age_encryption_recipients:
            raise self._lookup.rejected(
                model, request.seq_id, "age_encryption_recipients: this server does not encrypt exports"
            )
        path = self._path(model, request.seq_id, CheckpointKind.EXTERNAL, request.path)
        reply = encode.saved_external_json(str(path), 0)
        # An export is a copy to be downloaded; a second one of the same name replaces it.
        folder = await self._begin(model, path, request.seq_id, reply, ttl_s=request.ttl_seconds, overwrite=True)
        operation = SaveWeights(folder=folder, optimizer=False)
        return accepted(
            await self._lookup.submit(model, request.seq_id, RequestKind.SAVE_WEIGHTS_EXTERNAL, operation, reply)
        )

    async def load_into(self, caller: Caller, request: s.LoadWeightsRequest) -> s.FutureResponse:
        model, seq_id = self._lookup.model(caller, request.model_id or ""), request.seq_id or 0
        try:
            checkpoint = await self._checkpoints.open(TinkerPath.parse(request.path), caller.owner)
        except (Refusal, ValueError):
            self._training.reject(model, seq_id)
            raise
        if self._served.find(checkpoint.base_model) is not model.worker:
            raise self._lookup.rejected(
                model,
                seq_id,
                f"{request.path} belongs to the base model {checkpoint.base_model}, not {model.base_model}",
            )
        operation = LoadWeights(folder=checkpoint.folder, optimizer=request.optimizer)
        reply = encode.loaded_json(request.path, model.model_id)
        return accepted(await self._lookup.submit(model, seq_id, RequestKind.LOAD_WEIGHTS, operation, reply))

    async def weights_info(self, caller: Caller, path: str) -> s.WeightsInfoResponse:
        found = await self._checkpoints.find(TinkerPath.parse(path), caller.owner)
        return s.WeightsInfoResponse(
            base_model=found.base_model,
            lora_rank=found.lora.rank,
            train_unembed=found.lora.train_unembed,
            train_mlp=found.lora.train_mlp,
            train_attn=found.lora.train_attn,
        )

    async def _begin(
        self, model: TrackedModel, path: TinkerPath, seq_id: int, reply: JsonObject, **options: Any
    ) -> str:
        self._training.check_number(model, seq_id, reply)
        request_id = str(TrainRequestId(model.model_id, seq_id))
        try:
            return await self._checkpoints.begin(model, path, seq_id=seq_id, request_id=request_id, **options)
        except Refusal:
            self._training.reject(model, seq_id)
            raise

    def _path(self, model: TrackedModel, seq_id: int, kind: CheckpointKind, name: str) -> TinkerPath:
        try:
            return TinkerPath(model.model_id, kind, check_name(name))
        except ValueError:
            self._training.reject(model, seq_id)
            raise
