"""What the Tinker calls mean: sessions, models, training requests, results. Sampling calls are in `sampling_service`,
saving and loading in `weights_service`, what they share in `common`.

Every lookup is by owner: what belongs to another does not exist. Owns: the meaning of requests. Never touches: HTTP,
order and durability (`training`), workers.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from palestra.server.core.callers import Caller
from palestra.server.core.errors import Refusal, not_found
from palestra.server.core.futures import RequestKind, SampleFuture, TrainFuture
from palestra.server.core.models import TrainedModel
from palestra.server.core.paths import (
    ModelId,
    SampleRequestId,
    TinkerPath,
    parse_request_id,
)
from palestra.server.core.sessions import Session
from palestra.server.tinker import encode
from palestra.server.tinker import schemas as s
from palestra.server.tinker.common import is_over
from palestra.server.tinker.decode import PassRequest
from palestra.server.tinker.weights_service import WeightsService
from palestra.store import models as model_rows
from palestra.store import sessions as session_rows
from palestra.store.records import Checkpoint, Model
from palestra.store.records import Session as SessionRow
from palestra.types import AdamParams, LoraConfig
from palestra.types.engine import (
    CreateModel,
    Failure,
    OptimStep,
    PassResult,
    Sampled,
    Saved,
    StepDone,
    decode_from_worker,
)

Answer = dict[str, Any] | bytes | s.TryAgainResponse


class TinkerService(WeightsService):
    # Service and sessions

    def capabilities(self) -> s.CapabilitiesResponse:
        models = [
            s.SupportedModel(model_name=name, max_context_length=worker.card.max_positions if worker.card else None)
            for name, worker in self.hub.workers.items()
        ]
        return s.CapabilitiesResponse(supported_models=models)

    async def create_session(self, caller: Caller, request: s.CreateSessionRequest) -> str:
        session_id, now = secrets.token_hex(16), time.time()
        row = SessionRow(
            session_id=session_id,
            owner=caller.owner,
            created_at=now,
            last_heartbeat_at=now,
            tags=list(request.tags),
            user_metadata=dict(request.user_metadata or {}),
            sdk_version=request.sdk_version,
            project_id=request.project_id,
            display_name=request.display_name,
        )
        await self.hub.store.write(lambda c: session_rows.insert_session(c, row))
        self.hub.sessions.active[session_id] = Session(session_id, caller.owner)
        return session_id

    async def heartbeat(self, caller: Caller, session_id: str) -> None:
        session = self.hub.sessions.find(session_id, caller.owner)
        if session is None:
            row = await self.hub.store.read(lambda c: session_rows.get_session(c, session_id))
            if row is None or row.owner != caller.owner:
                raise not_found("session", session_id)
            raise Refusal(410, f"session {session_id} is over ({row.status})")
        session.touch()

    async def finish_session(self, caller: Caller, session_id: str, request: s.FinishSessionRequest) -> None:
        """The first end counts; saying it again is no error."""
        session = self.hub.sessions.find(session_id, caller.owner)
        if session is None:
            row = await self.hub.store.read(lambda c: session_rows.get_session(c, session_id))
            if row is None or row.owner != caller.owner:
                raise not_found("session", session_id)
            return
        await self.hub.end_session(
            session,
            "the session was finished by its client",
            lambda: self.hub.store.write(
                lambda c: session_rows.finish_session(c, session_id, reason=request.reason.type, detail=request.detail)
            ),
        )

    # Models

    async def create_model(self, caller: Caller, request: s.CreateModelRequest) -> s.FutureResponse:
        self._only_adam(request.optimizer_config.type)
        wanted = request.lora_config
        lora = LoraConfig(
            rank=wanted.rank,
            seed=wanted.seed,
            train_attn=wanted.train_attn,
            train_mlp=wanted.train_mlp,
            train_unembed=wanted.train_unembed,
        )
        session = self._session(caller, request.session_id)
        return await self._create(session, request.model_seq_id, request.base_model, lora, request.user_metadata, None)

    async def _create(
        self,
        session: Session,
        number: int,
        base_model: str,
        lora: LoraConfig,
        user_metadata: dict[str, str] | None,
        load: tuple[Checkpoint, bool] | None,
    ) -> s.FutureResponse:
        model_id = str(ModelId(session.session_id, number))
        model = self.hub.training.models.get(model_id)
        if model is None:
            model = await self._new_model(session, model_id, base_model, lora, user_metadata)
        if lora.seed is None:  # decided at the first call, so that a repeated one asks for the same
            lora = msgspec.structs.replace(lora, seed=model.lora.seed)
        checkpoint, optimizer = load or (None, False)
        operation = CreateModel(
            lora=lora, load_from=checkpoint.folder if checkpoint else None, load_optimizer=optimizer
        )
        reply: dict[str, Any] = encode.created_json(model_id)
        if checkpoint is not None:
            reply = encode.loaded_json(checkpoint.key.path, model_id)
        return await self._submit(model, 0, RequestKind.CREATE_MODEL, operation, reply)

    async def _new_model(
        self, session: Session, model_id: str, base_model: str, lora: LoraConfig, user_metadata: dict[str, str] | None
    ) -> TrainedModel:
        worker, now = self._base(base_model), time.time()
        self._runner(worker).check_lora(lora)
        if sum(m.worker is worker for m in self.hub.training.models.values()) >= self.hub.config.limits.max_models:
            raise Refusal(429, "this server holds as many models as it may; finish a session first", retry_after_s=10)
        if lora.seed is None:
            lora = msgspec.structs.replace(lora, seed=secrets.randbits(62))
        row = Model(
            model_id=model_id,
            session_id=session.session_id,
            owner=session.owner,
            base_model=base_model,
            lora=lora,
            created_at=now,
            last_request_at=now,
            user_metadata=user_metadata,
        )
        stored = await self.hub.store.write(lambda c: model_rows.insert_model(c, row))
        if stored.created_at != now:
            existing = self.hub.training.models.get(model_id)
            if existing is None:
                raise Refusal(400, f"{model_id} was created before and is {stored.status}; take the next number")
            return existing
        model = TrainedModel(model_id, session.session_id, session.owner, base_model, lora, worker)
        if session.session_id not in self.hub.sessions.active:  # it ended while the row was written
            await self.hub.unload(model, "its session is over")
            raise is_over(session.session_id)
        self.hub.training.models[model_id] = model
        return model

    def get_info(self, caller: Caller, model_id: str) -> s.GetInfoResponse:
        model = self._model(caller, model_id)
        card = model.worker.card
        data = s.ModelData(
            model_name=model.base_model,
            # The folder is of use to clients on this machine alone; others go by the name.
            tokenizer_id=model.worker.config.model if self.hub.config.is_loopback else None,
            arch=card.architecture if card else None,
        )
        return s.GetInfoResponse(
            model_id=model_id, model_data=data, lora_rank=model.lora.rank, model_name=model.base_model
        )

    async def unload_model(self, caller: Caller, model_id: str) -> s.FutureResponse:
        """Unloading what is not loaded (any more) is no error."""
        model = self.hub.training.models.get(model_id)
        if model is not None and model.owner == caller.owner:
            await self.hub.unload(model, "the model was unloaded")
        else:
            row = await self.hub.store.read(lambda c: model_rows.get_model(c, model_id))
            if row is None or row.owner != caller.owner:
                raise not_found("model", model_id)
        reply = {"model_id": model_id, "type": "unload_model"}
        future = self.hub.training.finished_at_once(model_id, caller.owner, RequestKind.UNLOAD_MODEL, reply)
        return s.FutureResponse(request_id=future.request_id, model_id=model_id)

    # Training requests

    async def run_pass(self, caller: Caller, request: PassRequest) -> s.FutureResponse:
        model = self._model(caller, request.model_id)
        if not request.operation.data:
            raise self._reject(model, request.seq_id, "the batch is empty: send at least one datum")
        kind = RequestKind.FORWARD if request.operation.forward_only else RequestKind.FORWARD_BACKWARD
        return await self._submit(model, request.seq_id, kind, request.operation, {})

    async def optim_step(self, caller: Caller, request: s.OptimStepRequest) -> s.FutureResponse:
        model = self._model(caller, request.model_id)
        if request.adam_params is None:
            name = request.optimizer_params.type if request.optimizer_params else ""
            raise self._reject(model, request.seq_id, f"{name!r}: this model's optimizer is adamw; send adam_params")
        operation = OptimStep(adam=AdamParams(**request.adam_params.model_dump()))
        return await self._submit(model, request.seq_id, RequestKind.OPTIM_STEP, operation, {})

    async def load_weights(self, caller: Caller, request: s.LoadWeightsRequest) -> s.FutureResponse:
        """Into a model, or as a new one."""
        if request.model_id is None:
            return await self._load_as_new(caller, request)
        return await self.load_into(caller, request)

    async def _load_as_new(self, caller: Caller, request: s.LoadWeightsRequest) -> s.FutureResponse:
        if request.optimizer_config is not None:
            self._only_adam(request.optimizer_config.type)
        session = self._session(caller, request.session_id or "")
        checkpoint = await self.hub.checkpoints.find(TinkerPath.parse(request.path), caller.owner)
        wanted = request.base_model or checkpoint.base_model
        if self._base(wanted) is not self.hub.base(checkpoint.base_model):
            raise Refusal(400, f"{request.path} is of {checkpoint.base_model}, not {wanted}")
        lora = msgspec.structs.replace(checkpoint.lora, seed=0)  # its start is overwritten at once
        return await self._create(
            session,
            request.model_seq_id or 0,
            wanted,
            lora,
            request.user_metadata,
            (checkpoint, request.optimizer),
        )

    # Results

    async def retrieve(self, caller: Caller, request_id: str, *, as_protobuf: bool) -> Answer:
        future = self._future(caller, request_id)
        if not await future.wait(self.hub.config.poll_hold_s):
            return self._not_yet(future)
        if isinstance(future, SampleFuture):
            future.retrieved = True
            assert future.frame is not None
            message = decode_from_worker(future.frame)
            assert isinstance(message, Sampled)
            if isinstance(message.outcome, Failure):
                return encode.failure_json(message.outcome)
            return encode.sample_protobuf(message.outcome) if as_protobuf else encode.sample_json(message.outcome)
        outcome = self.hub.training.outcome(future)
        match outcome:
            case Failure():
                return encode.failure_json(outcome)
            case PassResult():
                return encode.pass_protobuf(outcome) if as_protobuf else encode.pass_json(outcome)
            case StepDone():
                return encode.step_json(outcome)
            case Saved() if future.kind is RequestKind.SAVE_WEIGHTS_EXTERNAL:
                return {**future.reply, "size_bytes": outcome.size_bytes}
            case _:
                return future.reply

    def _future(self, caller: Caller, request_id: str) -> TrainFuture | SampleFuture:
        future = self.hub.training.futures.get(request_id) or self.hub.sampling.futures.get(request_id)
        if future is not None and future.owner == caller.owner:
            return future
        known = parse_request_id(request_id)
        if isinstance(known, SampleRequestId):  # another's is as lost as one that never was
            sampler = self.hub.sampling.samplers.get(known.sampler_id)
            self.hub.metrics.sample_lost(sampler.worker.name if sampler else "")
            raise Refusal(410, "this sample is not here any more (the server was started again); send it again")
        lost = self.hub.training.lost.message(known.model_id, owner=caller.owner) if known is not None else None
        raise not_found("request", request_id) if lost is None else Refusal(404, lost)

    def _not_yet(self, future: TrainFuture | SampleFuture) -> s.TryAgainResponse:
        paused = None
        if self.hub.is_leaving:
            paused = "the server is being stopped; it goes on when it is back"
        else:
            of = self.hub.training.models if isinstance(future, TrainFuture) else self.hub.sampling.samplers
            owner = of.get(future.model_id if isinstance(future, TrainFuture) else future.sampler_id)
            if owner is not None and not owner.worker.link.is_up:
                paused = self._why_down(owner.worker)
        return s.TryAgainResponse(
            request_id=future.request_id,
            queue_state="paused_capacity" if paused else "active",
            queue_state_reason=paused,
        )

    def _only_adam(self, optimizer: str) -> None:
        if optimizer != "adamw":
            raise Refusal(400, f"optimizer {optimizer[:50]!r} is not available here; use adamw")
