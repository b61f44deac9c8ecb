"""The server as its page shows it: engines, calls, models in training, charts of the last minutes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from palestra import __version__
from palestra.config.serve import ModelConfig
from palestra.server.core.owners.callers import Caller
from palestra.server.core.samples.requests import SamplingRequests
from palestra.server.core.sessions import TinkerSessions
from palestra.server.core.telemetry.activity import (
    LATENCY_S,
    RATE_S,
    Activity,
    CallReading,
    EngineReading,
    ServerReading,
    grown,
    quantile,
    rate,
)
from palestra.server.core.telemetry.disk_health import DiskHealth
from palestra.server.core.telemetry.metrics import Metrics
from palestra.server.core.telemetry.readiness import EngineStates
from palestra.server.core.training.models import TrackedModel
from palestra.server.core.training.requests import TrainingRequests
from palestra.server.core.workers.served_models import ServedModels
from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.server.replicas.runner import ReplicaRunner
from palestra.store.records import Rights

MAX_MODELS = 500
SAMPLES = "palestra_replica_samples_total"


class EngineActivity(Struct, frozen=True, kw_only=True):
    """A base model and the engine that serves it. What follows `sampler` is there for keys that may read metrics."""

    name: str
    names: list[str]
    is_up: bool
    device: str | None
    dtype: str | None
    parameters: int | None
    max_positions: int | None
    sampler: str
    """torch or vllm."""
    trained_per_s: float | None = None
    """Tokens that went through training passes, each second, over the last 10 s."""
    sampled_per_s: float | None = None
    models: int | None = None
    waiting_train: int | None = None
    """Training calls without a result, and how long the oldest has waited."""
    waiting_train_s: float | None = None
    waiting_sample: int | None = None
    waiting_sample_s: float | None = None
    running_samples: int | None = None
    batch_models: float | None = None
    """Models that share a training micro-batch, on average over the last 5 minutes."""
    batch_rows: float | None = None
    """Rows of a sampling step, likewise."""
    kv_used: float | None = None
    token_gap_p95_s: float | None = None
    adapter_bytes: int | None = None
    kept_samplers: int | None = None
    sampler_bytes: int | None = None
    snapshots: int | None = None
    optim_steps: int | None = None
    tokens_trained: int | None = None
    tokens_sampled: int | None = None
    restarts: dict[str, int] = {}
    samples_lost: int | None = None


class CallState(Struct, frozen=True, kw_only=True):
    """A type of call over the last 5 minutes. Times are in seconds; None without a call."""

    base_model: str
    type: str
    per_s: float
    compute_p50_s: float | None
    compute_p95_s: float | None
    overhead_p50_s: float | None
    """Time from submission to result, without the computation."""
    overhead_p95_s: float | None
    failed: int
    """Calls since the start that ended otherwise than well."""


class TenantModel(Struct, frozen=True, kw_only=True):
    """A model in training."""

    model_id: str
    owner: str
    base_model: str
    rank: int
    pending: int
    requests: int
    last_request_at: float


class ReplicaState(Struct, frozen=True, kw_only=True):
    """A process that samples beside the worker of a base model."""

    base_model: str
    number: int
    name: str
    is_up: bool
    trouble: str
    """Why it is not up."""
    requests: int
    """Requests that it has now."""
    samples: int
    """Requests that it has answered since the server started."""


class ServerState(Struct, frozen=True, kw_only=True):
    version: str
    started_at: float
    troubles: list[str]
    """Why the server is not ready; empty: it is."""
    sees_all: bool
    """Whether the figures of all owners are included."""
    engines: list[EngineActivity]
    replicas: list[ReplicaState]
    """Samplers beside the workers, for keys that may read metrics."""
    calls: list[CallState]
    models: list[TenantModel]
    """In training: the caller's, or all of them for an admin; the most recently used first."""
    models_total: int
    sessions: int
    """Sessions of clients that are alive, of the same owners."""
    sampling_sessions: int


def sees_all(caller: Caller) -> bool:
    """Whether the metrics are for this caller: they contain all owners."""
    return caller.right in (Rights.ADMIN, Rights.METRICS)


class ServerReader:
    def __init__(
        self,
        models: Sequence[ModelConfig],
        served: ServedModels,
        engines: EngineStates,
        sessions: TinkerSessions,
        training: TrainingRequests,
        sampling: SamplingRequests,
        activity: Activity,
        disks: DiskHealth,
        metrics: Metrics,
    ):
        self._models, self._served, self._engines, self._sessions = models, served, engines, sessions
        self._training, self._sampling = training, sampling
        self._activity, self._disks, self._metrics = activity, disks, metrics

    async def read(self, caller: Caller) -> ServerState:
        has_figures = sees_all(caller)
        models = _theirs(caller, self._training.models.values())
        models.sort(key=lambda model: model.last_request_at, reverse=True)
        owners = None if caller.right is Rights.ADMIN else caller.owner
        now = self._activity.read()
        return ServerState(
            version=__version__,
            started_at=self._activity.started_at,
            troubles=await self._troubles(has_figures),
            sees_all=has_figures,
            engines=[self._engine(worker, now if has_figures else None) for worker in self._served],
            replicas=self._replicas() if has_figures else [],
            calls=_calls(self._activity, now) if has_figures else [],
            models=[_model(model) for model in models[:MAX_MODELS]],
            models_total=len(models),
            sessions=sum(owners in (None, one.owner) for one in self._sessions.active.values()),
            sampling_sessions=sum(owners in (None, one.owner) for one in self._sampling.samplers.values()),
        )

    async def _troubles(self, sees_all: bool) -> list[str]:
        found = [f"{name}: {why}" for name, why in self._engines.troubles().items()]
        return found + (await self._disks.troubles() if sees_all else [])

    def _engine(self, worker: WorkerSupervisor, now: ServerReading | None) -> EngineActivity:
        card = worker.card
        plain = EngineActivity(
            name=worker.name,
            names=self._served.names_of(worker),
            is_up=worker.link.is_up and self._sampling.runners[worker].is_up,
            device=card.device if card else None,
            dtype=card.dtype if card else None,
            parameters=card.parameters if card else None,
            max_positions=card.max_positions if card else None,
            sampler=next((one.sampler for one in self._models if one.name[0] == worker.name), "torch"),
        )
        return plain if now is None else _with_figures(plain, self._activity, now)

    def _replicas(self) -> list[ReplicaState]:
        counted = {
            (labels["base_model"], labels["replica"]): int(value) for _, labels, value in self._metrics.read([SAMPLES])
        }
        return [
            ReplicaState(
                base_model=worker.name,
                number=one.number,
                name=one.where,
                is_up=one.is_up,
                trouble=one.trouble,
                requests=one.requests,
                samples=counted.get((worker.name, str(one.number)), 0),
            )
            for worker in self._served
            if isinstance(runner := self._sampling.runners[worker], ReplicaRunner)
            for one in runner.replicas.replicas
        ]


def _theirs(caller: Caller, models: Iterable[TrackedModel]) -> list[TrackedModel]:
    return [one for one in models if caller.right is Rights.ADMIN or one.owner == caller.owner]


def _model(model: TrackedModel) -> TenantModel:
    return TenantModel(
        model_id=model.model_id,
        owner=model.owner,
        base_model=model.base_model,
        rank=model.lora.rank,
        pending=sum(not future.is_done for future in model.futures.values()),
        requests=model.next_seq,
        last_request_at=model.last_request_at,
    )


def _with_figures(plain: EngineActivity, activity: Activity, now: ServerReading) -> EngineActivity:
    reading = now.engines.get(plain.name, EngineReading())
    recent, earlier = activity.before(RATE_S), activity.before(LATENCY_S)

    def counted(field: str) -> int:
        return int(reading.values.get(field, 0))

    def mean(total: str, count: str) -> float | None:
        """Returns the mean size of batches."""
        if earlier is None:
            return None
        batches = rate(earlier, now, plain.name, count)
        return rate(earlier, now, plain.name, total) / batches if batches else None

    figures = {
        "trained_per_s": rate(recent, now, plain.name, "tokens_trained") if recent else 0.0,
        "sampled_per_s": rate(recent, now, plain.name, "tokens_sampled") if recent else 0.0,
        "waiting_train": reading.waiting.get("train", 0),
        "waiting_train_s": reading.oldest_s.get("train", 0.0),
        "waiting_sample": reading.waiting.get("sample", 0),
        "waiting_sample_s": reading.oldest_s.get("sample", 0.0),
        "batch_models": mean("train_batch_models", "train_batches"),
        "batch_rows": mean("sample_rows", "sample_steps"),
        "kv_used": reading.values.get("kv_used", 0.0),
        "token_gap_p95_s": reading.values.get("token_gap_p95_s", 0.0),
        "restarts": reading.restarts,
        "samples_lost": reading.samples_lost,
    }
    counts = ("models", "running_samples", "adapter_bytes", "kept_samplers", "sampler_bytes", "snapshots")
    counts += ("optim_steps", "tokens_trained", "tokens_sampled")
    known = {name: getattr(plain, name) for name in EngineActivity.__struct_fields__}
    return EngineActivity(**{**known, **figures, **{name: counted(name) for name in counts}})


def _calls(activity: Activity, now: ServerReading) -> list[CallState]:
    earlier = activity.before(LATENCY_S)
    if earlier is None:
        return []
    found = [
        _call(name, earlier.calls.get(name, CallReading()), call, now.at - earlier.at)
        for name, call in sorted(now.calls.items())
    ]
    return [call for call in found if call.per_s or call.failed]


def _call(name: tuple[str, str], old: CallReading, new: CallReading, seconds: float) -> CallState:
    compute, overhead = grown(old.compute, new.compute), grown(old.overhead, new.overhead)
    return CallState(
        base_model=name[0],
        type=name[1],
        per_s=(sum(new.outcomes.values()) - sum(old.outcomes.values())) / seconds,
        compute_p50_s=quantile(compute, 0.5),
        compute_p95_s=quantile(compute, 0.95),
        overhead_p50_s=quantile(overhead, 0.5),
        overhead_p95_s=quantile(overhead, 0.95),
        failed=sum(count for outcome, count in new.outcomes.items() if outcome != "ok"),
    )
