"""What the Tinker calls share: finding things by owner, handing a training request on."""

from __future__ import annotations

from typing import Any

from palestra.server.core.callers import Caller
from palestra.server.core.errors import LASTING, Refusal, not_found
from palestra.server.core.futures import RequestKind
from palestra.server.core.models import TrainedModel
from palestra.server.core.sample_runners import SampleRunner
from palestra.server.core.sampling import Sampler
from palestra.server.core.sessions import Session
from palestra.server.core.workers import Worker
from palestra.server.hub import Hub
from palestra.server.tinker import schemas as s
from palestra.types.engine import Operation


class Common:
    def __init__(self, hub: Hub):
        self.hub = hub

    async def _submit(
        self, model: TrainedModel, seq_id: int, kind: RequestKind, operation: Operation, reply: dict[str, Any]
    ) -> s.FutureResponse:
        if self.hub.is_leaving:
            raise Refusal(503, "the server is being stopped", retry_after_s=2.0)
        self._alive(model.session_id)
        future = await self.hub.training.submit(model, seq_id, kind, operation, reply)
        self.hub.metrics.submitted(kind, base_model=model.worker.name)
        return s.FutureResponse(request_id=future.request_id, model_id=model.model_id)

    def _reject(self, model: TrainedModel, seq_id: int, detail: str) -> Refusal:
        self.hub.training.reject(model, seq_id)
        return Refusal(400, detail)

    def _model(self, caller: Caller, model_id: str) -> TrainedModel:
        model = self.hub.training.models.get(model_id)
        if model is None or model.owner != caller.owner:
            lost = self.hub.training.lost.message(model_id, owner=caller.owner)
            gone = f"no such model: {model_id[:200]} (its session may be over, or it was unloaded)"
            raise Refusal(404, lost or gone)
        return model

    def _sampler(self, caller: Caller, sampler_id: str) -> Sampler:
        sampler = self.hub.sampling.samplers.get(sampler_id)
        if sampler is None or sampler.owner != caller.owner:
            raise not_found("sampling session", sampler_id)
        return sampler

    def _session(self, caller: Caller, session_id: str) -> Session:
        session = self.hub.sessions.find(session_id, caller.owner)
        if session is None:
            raise is_over(session_id)
        session.touch()
        return session

    def _alive(self, session_id: str) -> None:
        """A request is a sign of life too."""
        session = self.hub.sessions.active.get(session_id)
        if session is not None:
            session.touch()

    def _runner(self, worker: Worker) -> SampleRunner:
        return self.hub.sampling.runners[worker]

    def _why_down(self, worker: Worker) -> str:
        """Of an engine that is not there. Who waits for one that cannot be started for long is told so instead: what
        was asked of it stays, and can be read when it is back."""
        if worker.start_error is None:
            return "the engine is starting"
        reason = f"the engine cannot be started: {worker.start_error}"
        if worker.cannot_start:
            raise Refusal(LASTING, f"{reason}; see to the server's disk, then ask for the result again")
        return reason

    def _base(self, base_model: str) -> Worker:
        worker = self.hub.base(base_model)
        if worker is None:
            raise Refusal(400, f"base model {base_model[:200]!r} is not served here: {', '.join(self.hub.workers)}")
        return worker


def is_over(session_id: str) -> Refusal:
    return Refusal(404, f"no such session, or it is over: {session_id[:200]}")
