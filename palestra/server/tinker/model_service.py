"""The meaning of calls about whole models: they are made, loaded as new, shown and unloaded."""

from __future__ import annotations

import secrets
import time

import msgspec

from palestra.server.core.checkpoints.files import CheckpointFiles
from palestra.server.core.errors import Refusal, not_found
from palestra.server.core.futures import RequestKind
from palestra.server.core.lookup import Lookup, is_over
from palestra.server.core.owners.callers import Caller
from palestra.server.core.owners.quotas import OwnerQuotas, exceeded
from palestra.server.core.paths import ModelId, TinkerPath
from palestra.server.core.samples.requests import SamplingRequests
from palestra.server.core.sessions import TinkerSession, TinkerSessions
from palestra.server.core.teardown import Teardown
from palestra.server.core.training.models import TrackedModel
from palestra.server.core.training.requests import TrainingRequests
from palestra.server.core.workers.served_models import ServedModels
from palestra.server.tinker import encode
from palestra.server.tinker import schemas as s
from palestra.server.tinker.encode import accepted
from palestra.store import Store
from palestra.store.errors import QuotaExceeded
from palestra.store.queries import models as model_rows
from palestra.store.queries.quotas import insert_model_within
from palestra.store.records import CheckpointRow, ModelRow
from palestra.types import LoraConfig
from palestra.types.engine import CreateModel
from palestra.util.json_types import JsonObject


class ModelService:
    def __init__(
        self,
        store: Store,
        lookup: Lookup,
        served: ServedModels,
        sessions: TinkerSessions,
        training: TrainingRequests,
        sampling: SamplingRequests,
        checkpoints: CheckpointFiles,
        quotas: OwnerQuotas,
        teardown: Teardown,
        *,
        max_models: int,
        is_loopback: bool,
    ):
        """`is_loopback`: clients are on this machine."""
        self._store, self._lookup, self._served, self._sessions = store, lookup, served, sessions
        self._training, self._sampling, self._checkpoints = training, sampling, checkpoints
        self._quotas, self._teardown = quotas, teardown
        self._max_models, self._is_loopback = max_models, is_loopback

    async def create_model(self, caller: Caller, request: s.CreateModelRequest) -> s.FutureResponse:
        _only_adam(request.optimizer_config.type)
        lora_config = request.lora_config
        lora = LoraConfig(
            rank=lora_config.rank,
            seed=lora_config.seed,
            train_attn=lora_config.train_attn,
            train_mlp=lora_config.train_mlp,
            train_unembed=lora_config.train_unembed,
        )
        session = self._lookup.session(caller, request.session_id)
        return await self._create(session, request.model_seq_id, request.base_model, lora, request.user_metadata, None)

    async def _create(
        self,
        session: TinkerSession,
        number: int,
        base_model: str,
        lora: LoraConfig,
        user_metadata: dict[str, str] | None,
        load: tuple[CheckpointRow, bool] | None,
    ) -> s.FutureResponse:
        model_id = str(ModelId(session.session_id, number))
        model = self._training.models.get(model_id)
        if model is None:
            model = await self._new_model(session, model_id, base_model, lora, user_metadata)
        if lora.seed is None:  # decided at the first call, so that a repeated one asks for the same
            lora = msgspec.structs.replace(lora, seed=model.lora.seed)
        checkpoint, optimizer = load or (None, False)
        operation = CreateModel(
            lora=lora, load_from=checkpoint.folder if checkpoint else None, load_optimizer=optimizer
        )
        reply: JsonObject = encode.created_json(model_id)
        if checkpoint is not None:
            reply = encode.loaded_json(checkpoint.key.path, model_id)
        return accepted(await self._lookup.submit(model, 0, RequestKind.CREATE_MODEL, operation, reply))

    async def _new_model(
        self,
        session: TinkerSession,
        model_id: str,
        base_model: str,
        lora: LoraConfig,
        user_metadata: dict[str, str] | None,
    ) -> TrackedModel:
        worker, now = self._lookup.base(base_model), time.time()
        self._sampling.runners[worker].check_lora(lora)
        if sum(m.worker is worker for m in self._training.models.values()) >= self._max_models:
            raise Refusal(429, "this server has reached its limit of models; finish a session first", retry_after_s=10)
        if lora.seed is None:
            lora = msgspec.structs.replace(lora, seed=secrets.randbits(62))
        row = ModelRow(
            model_id=model_id,
            session_id=session.session_id,
            owner=session.owner,
            base_model=base_model,
            lora=lora,
            created_at=now,
            last_request_at=now,
            user_metadata=user_metadata,
        )
        limit = self._quotas.of(session.owner).models
        try:
            stored = await self._store.write(lambda c: insert_model_within(c, row, limit))
        except QuotaExceeded as e:
            raise exceeded(e) from None
        if stored.created_at != now:
            existing = self._training.models.get(model_id)
            if existing is None:
                raise Refusal(400, f"{model_id} was created before and is {stored.status}; use the next model_seq_id")
            return existing
        model = TrackedModel(model_id, session.session_id, session.owner, base_model, lora, worker)
        if session.session_id not in self._sessions.active:  # it ended while the row was written
            await self._teardown.unload(model, "its session has ended")
            raise is_over(session.session_id)
        self._training.models[model_id] = model
        return model

    def get_info(self, caller: Caller, model_id: str) -> s.GetInfoResponse:
        model = self._lookup.model(caller, model_id)
        card = model.worker.card
        data = s.ModelData(
            model_name=model.base_model,
            # The folder is useful only to clients on this machine; others use the name.
            tokenizer_id=model.worker.config.model if self._is_loopback else None,
            arch=card.architecture if card else None,
        )
        return s.GetInfoResponse(
            model_id=model_id, model_data=data, lora_rank=model.lora.rank, model_name=model.base_model
        )

    async def unload_model(self, caller: Caller, model_id: str) -> s.FutureResponse:
        """Unloads a model; it is no error if the model is not loaded (any more)."""
        model = self._training.models.get(model_id)
        if model is not None and model.owner == caller.owner:
            await self._teardown.unload(model, "the model was unloaded")
        else:
            row = await self._store.read(lambda c: model_rows.get_model(c, model_id))
            if row is None or row.owner != caller.owner:
                raise not_found("model", model_id)
        reply = {"model_id": model_id, "type": "unload_model"}
        future = self._training.finished_at_once(model_id, caller.owner, RequestKind.UNLOAD_MODEL, reply)
        return s.FutureResponse(request_id=future.request_id, model_id=model_id)

    async def load_as_new(self, caller: Caller, request: s.LoadWeightsRequest) -> s.FutureResponse:
        if request.optimizer_config is not None:
            _only_adam(request.optimizer_config.type)
        session = self._lookup.session(caller, request.session_id or "")
        checkpoint = await self._checkpoints.open(TinkerPath.parse(request.path), caller.owner)
        base_model = request.base_model or checkpoint.base_model
        if self._lookup.base(base_model) is not self._served.find(checkpoint.base_model):
            raise Refusal(400, f"{request.path} belongs to the base model {checkpoint.base_model}, not {base_model}")
        lora = msgspec.structs.replace(checkpoint.lora, seed=0)  # its initial weights are overwritten at once
        return await self._create(
            session,
            request.model_seq_id or 0,
            base_model,
            lora,
            request.user_metadata,
            (checkpoint, request.optimizer),
        )


def _only_adam(optimizer: str) -> None:
    if optimizer != "adamw":
        raise Refusal(400, f"optimizer {optimizer[:50]!r} is not available here; use adamw")
