"""Finding things by owner, and passing a training request on. What belongs to another owner does not exist.

Owns: who may find what, and the error if it is missing. Never touches: what is done with it.
"""

from __future__ import annotations

from palestra.server.core.errors import LASTING, Refusal, not_found
from palestra.server.core.futures import RequestKind, TrainFuture
from palestra.server.core.owners.callers import Caller
from palestra.server.core.samples.requests import SamplingRequests, SamplingSession
from palestra.server.core.sessions import TinkerSession, TinkerSessions
from palestra.server.core.shutdown import Shutdown
from palestra.server.core.telemetry.metrics import Metrics
from palestra.server.core.training.models import TrackedModel
from palestra.server.core.training.requests import TrainingRequests
from palestra.server.core.workers.served_models import ServedModels
from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.types.engine import Operation
from palestra.util.json_types import JsonObject


class Lookup:
    def __init__(
        self,
        served: ServedModels,
        sessions: TinkerSessions,
        training: TrainingRequests,
        sampling: SamplingRequests,
        metrics: Metrics,
        shutdown: Shutdown,
    ):
        self._served, self._sessions, self._training, self._sampling = served, sessions, training, sampling
        self._metrics, self._shutdown = metrics, shutdown

    def model(self, caller: Caller, model_id: str) -> TrackedModel:
        model = self._training.models.get(model_id)
        if model is None or model.owner != caller.owner:
            lost = self._training.lost.message(model_id, owner=caller.owner)
            gone = f"no such model: {model_id[:200]} (its session may have ended, or it was unloaded)"
            raise Refusal(404, lost or gone)
        return model

    def sampler(self, caller: Caller, sampler_id: str) -> SamplingSession:
        sampler = self._sampling.samplers.get(sampler_id)
        if sampler is None or sampler.owner != caller.owner:
            raise not_found("sampling session", sampler_id)
        return sampler

    def session(self, caller: Caller, session_id: str) -> TinkerSession:
        session = self._sessions.find(session_id, caller.owner)
        if session is None:
            raise is_over(session_id)
        session.touch()
        return session

    def base(self, base_model: str) -> WorkerSupervisor:
        worker = self._served.find(base_model)
        if worker is None:
            names = ", ".join(self._served.names)
            raise Refusal(400, f"base model {base_model[:200]!r} is not served here; served: {names}")
        return worker

    def keep_alive(self, session_id: str) -> None:
        """Notes a request as a sign of life of its session, as a heartbeat is."""
        session = self._sessions.active.get(session_id)
        if session is not None:
            session.touch()

    def refuse_when_stopping(self) -> None:
        if self._shutdown.has_begun:
            raise Refusal(503, "the server is being stopped", retry_after_s=2.0)

    async def submit(
        self,
        model: TrackedModel,
        seq_id: int,
        kind: RequestKind,
        operation: Operation,
        reply: JsonObject,
        completed: Operation | None = None,
    ) -> TrainFuture:
        self.refuse_when_stopping()
        self.keep_alive(model.session_id)
        future = await self._training.submit(model, seq_id, kind, operation, reply, completed)
        self._metrics.submitted(kind, base_model=model.worker.name)
        return future

    def rejected(self, model: TrackedModel, seq_id: int, detail: str) -> Refusal:
        """Refuses a request, which has used its number all the same."""
        self._training.reject(model, seq_id)
        return Refusal(400, detail)


def is_over(session_id: str) -> Refusal:
    return Refusal(404, f"no such session, or it has ended: {session_id[:200]}")


def why_down(worker: WorkerSupervisor) -> str:
    """Returns why an engine is not up. A caller that waits for one that has not been startable for long gets a Refusal;
    its requests stay, and their results can be read when it is back."""
    if worker.start_error is None:
        return "the engine is starting"
    reason = f"the engine cannot be started: {worker.start_error}"
    if worker.cannot_start:
        raise Refusal(LASTING, f"{reason}; check the server's disk, then ask for the result again")
    return reason
