"""Replicas of our own engine: those that the server starts, and those that join from elsewhere."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from palestra.config.serve import ReplicasConfig
from palestra.server.core.checkpoints.adapter_transfers import AdapterTransfers
from palestra.server.core.telemetry.metrics import Metrics
from palestra.server.core.workers.supervisor import RemoteWorker, WorkerSupervisor
from palestra.server.core.workers.watchdog import WatchdogTimeouts
from palestra.server.replicas.engine_replica import EngineReplica, ReplicaContext
from palestra.server.replicas.own_replica import OwnReplica
from palestra.server.replicas.runner import ReplicaRunner
from palestra.types.engine import Sampled, Streamed, WorkerConfig

R = TypeVar("R", bound=EngineReplica)


class EngineRunner(ReplicaRunner):
    def __init__(
        self,
        worker: WorkerSupervisor,
        settings: ReplicasConfig,
        metrics: Metrics,
        transfers: AdapterTransfers,
        *,
        on_sampled: Callable[[Sampled], None],
        on_streamed: Callable[[Streamed], None],
    ):
        super().__init__(
            worker, metrics, transfers, wait_s=settings.wait_s, on_sampled=on_sampled, on_streamed=on_streamed
        )
        self._context = ReplicaContext(
            worker.name,
            transfers,
            max_in_flight=settings.max_in_flight,
            max_adapters=settings.max_adapters,
            on_change=self.replicas.on_change,
            on_load=lambda: metrics.replica_loaded(worker.name),
        )
        self._numbers = itertools.count()
        self._own: list[OwnReplica] = []
        self._remote_numbers: dict[str, int] = {}

    def add_own(
        self,
        config: WorkerConfig,
        log_file: Path,
        *,
        patience: WatchdogTimeouts,
        write_wait_s: float,
        remote: RemoteWorker | None,
    ) -> None:
        """Adds a replica that is started with the server."""
        replica = OwnReplica(
            next(self._numbers),
            self._context,
            config,
            log_file=log_file,
            patience=patience,
            write_wait_s=write_wait_s,
            remote=remote,
        )
        self._own.append(replica)
        self.replicas.add(replica)

    def add_remote(self, replica_id: str, make: Callable[[int, ReplicaContext], R]) -> R:
        """Adds a replica that has joined; one that comes back has the number that it had."""
        if replica_id not in self._remote_numbers:
            self._remote_numbers[replica_id] = next(self._numbers)
        replica = make(self._remote_numbers[replica_id], self._context)
        self.replicas.add(replica)
        return replica

    async def start(self) -> None:
        await asyncio.gather(*(replica.start() for replica in self._own))
