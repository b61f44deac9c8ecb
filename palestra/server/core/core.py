"""The parts of the core: the store, training, samples, workers, checkpoints, sessions.

Owns: the parts, and how they are connected. Never touches: HTTP, protocols, what comes from workers
(`workers.messages`), restarts (`restore`), recurring work (`maintenance`), the ends of sessions (`teardown`).
"""

from __future__ import annotations

import hmac
import time

from palestra.config.serve import ServeConfig
from palestra.server.core.checkpoints.adapter_depot import AdapterDepot
from palestra.server.core.checkpoints.files import CheckpointFiles
from palestra.server.core.checkpoints.snapshot_copies import SnapshotCopies
from palestra.server.core.checkpoints.storage import CheckpointStorage
from palestra.server.core.owners.key_watch import KeyWatch
from palestra.server.core.owners.quotas import OwnerQuotas
from palestra.server.core.owners.usage import UsageAccount
from palestra.server.core.samples.requests import SamplingRequests
from palestra.server.core.sessions import TinkerSessions
from palestra.server.core.telemetry.activity import Activity
from palestra.server.core.telemetry.disk_health import DiskHealth
from palestra.server.core.telemetry.metrics import JournalState, Metrics, RequestQueueState
from palestra.server.core.telemetry.observer import CallObserver
from palestra.server.core.trace_archive import TraceArchive
from palestra.server.core.training.futures import SAVING, RequestKind, TrainFuture
from palestra.server.core.training.lost_models import LostModels
from palestra.server.core.training.request_journal import RequestJournal
from palestra.server.core.training.requests import TrainingRequests
from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.store import Journal, Store
from palestra.store.journal.acknowledged import AcknowledgedRequests
from palestra.store.queries import models as model_rows
from palestra.store.records import ModelStatus
from palestra.store.usage_log import UsageLog
from palestra.types.engine import EngineFailure, TrainOutcome


class Core:
    def __init__(self, config: ServeConfig, store: Store, journals: tuple[Journal, Journal], secret: str):
        self.config, self.store, self.secret = config, store, secret
        self.metrics = Metrics()
        self.activity = Activity(self.metrics)
        self.observer = CallObserver.of(self.metrics, config.otlp_endpoint)
        self.sessions = TinkerSessions()
        self.usage = UsageAccount(store, UsageLog(config.state / "usage.log"), self.metrics)
        self.quotas = OwnerQuotas(store, self.usage, self.metrics)
        url, cache_bytes = config.checkpoint_url, config.limits.max_checkpoint_cache_bytes
        self.checkpoints = CheckpointFiles(
            store,
            config.checkpoint_folder,
            keep_deleted_s=config.keep_deleted_s,
            max_bytes=lambda owner: self.quotas.of(owner).checkpoint_bytes,
            write_wait_s=config.write_wait_s,
            storage=None if url is None else CheckpointStorage(url, max_cache_bytes=cache_bytes),
        )
        self.training = TrainingRequests(
            RequestJournal(*journals, self.checkpoints.locate),
            AcknowledgedRequests(config.state / "acknowledged"),
            LostModels(store),
            self.observer,
            self.quotas,
            self.usage,
            self._save_snapshot_seq,
            self._send_samples,
            gap_wait_s=config.gap_wait_s,
            keep_results_s=config.keep_results_s,
            max_pending_bytes=config.limits.max_pending_train_bytes,
        )
        self.sampling = SamplingRequests(
            self.observer,
            self.quotas,
            self.usage,
            max_pending=config.limits.max_pending_samples,
            keep_results_s=config.keep_results_s,
            max_routing_bytes=config.limits.max_routing_bytes,
        )
        self.archive = None if config.archive is None else TraceArchive(store, config.archive)
        self.copies: SnapshotCopies | None = None
        if config.snapshots is not None:
            self.copies = SnapshotCopies(store, config.snapshots, config.state, self.training.on_copied)
            self.training.copied_seq = self.copies.copied_seq
        self.adapters = AdapterDepot(
            config.state / "adapters",
            max_bytes=config.limits.max_adapter_bytes,
            is_held=lambda worker: self.training.dispatcher(worker).is_quarantined,
        )
        self.workers: dict[str, WorkerSupervisor] = {}
        """Workers by each name under which a base model is served."""
        self.disks = DiskHealth.of(config)
        self.key_uses: dict[int, float] = {}
        """When keys were used last, by their numbers, since the server has started."""
        self.keys = KeyWatch(store, self.key_uses)
        self.replica_key = hmac.digest(secret.encode(), b"palestra replicas", "sha256").hex()
        """Key of the samplers that the server starts itself. It is the same after a restart."""
        self.own_url = ""
        """Address at which processes on this machine reach the server."""
        self.is_stopping = False
        self.training.hooks.update(dict.fromkeys(SAVING, self.checkpoints.on_saved))
        self.training.hooks[RequestKind.CREATE_MODEL] = self._on_created
        self.metrics.watch_queues(self.queues)
        self.metrics.watch_journal(
            lambda: JournalState(sum(j.size_bytes for j in journals), sum(j.file_count for j in journals))
        )

    @property
    def all_workers(self) -> list[WorkerSupervisor]:
        return list(dict.fromkeys(self.workers.values()))

    def names_of(self, worker: WorkerSupervisor) -> list[str]:
        """Returns the names under which a worker's base model is served."""
        return [name for name, one in self.workers.items() if one is worker]

    def base(self, name: str) -> WorkerSupervisor | None:
        """Returns the worker of a base model; `name:variant` is served as `name`."""
        return self.workers.get(name) or self.workers.get(name.partition(":")[0])

    def engine_troubles(self) -> dict[str, str]:
        """Returns which base models cannot be used fully now, and why."""
        found = {}
        for worker in self.all_workers:
            if not worker.link.is_up:
                found[worker.name] = "the engine is not running"
            elif not self.sampling.runners[worker].is_up:
                found[worker.name] = "no sampler is available"
        return found

    def calls_waiting(self) -> dict[str, int]:
        return {worker.name: self.sampling.waiting(worker) for worker in self.all_workers}

    @property
    def poll_hold_s(self) -> float:
        """How long a poll may wait for a result. One that was answered because the server stops comes again at once."""
        return 0.0 if self.is_stopping else self.config.poll_hold_s

    def begin_shutdown(self) -> None:
        """Answers all waiting polls at once and accepts no new requests."""
        self.is_stopping = True
        for future in self.training.futures.values():
            future.wake()
        self.sampling.wake()

    def _send_samples(self, worker: WorkerSupervisor) -> None:
        self.sampling.send_waiting(worker)
        self.adapters.ask_again(worker)

    async def _save_snapshot_seq(self, model_id: str, seq_id: int) -> None:
        await self.store.write(lambda c: model_rows.advance_snapshots(c, {model_id: seq_id}))

    async def _on_created(self, future: TrainFuture, outcome: TrainOutcome) -> None:
        failed = outcome.message if isinstance(outcome, EngineFailure) else None
        status = ModelStatus.FAILED if failed else ModelStatus.READY
        await self.store.write(lambda c: model_rows.set_model_status(c, future.model_id, status, error=failed))
        model = self.training.models.get(future.model_id)
        if failed and model is not None:
            self.training.drop(model, failed)

    def queues(self) -> list[RequestQueueState]:
        now = time.monotonic()
        train: dict[str, list[float]] = {w.name: [] for w in self.all_workers}
        sample: dict[str, list[float]] = {w.name: [] for w in self.all_workers}
        for model in self.training.models.values():
            train[model.worker.name] += [f.submitted for f in model.futures.values() if not f.is_done]
        for future in self.sampling.pending.values():
            sampler = self.sampling.samplers.get(future.sampler_id)
            if sampler is not None:
                sample[sampler.worker.name].append(future.submitted)
        return [
            RequestQueueState(name, kind, len(since), now - min(since, default=now))
            for kind, queues in (("train", train), ("sample", sample))
            for name, since in queues.items()
        ]
