"""Whether the server can do all that it is asked for, and if not, why: its engines, its disks, its database.

Owns: putting it together, and how many calls wait for each engine. Never touches: engines, disks, requests.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from palestra.server.core.samples.requests import SamplingRequests
from palestra.server.core.shutdown import Shutdown
from palestra.server.core.telemetry.disk_health import DiskHealth
from palestra.server.core.telemetry.metrics import RequestQueueState
from palestra.server.core.training.requests import TrainingRequests
from palestra.server.core.workers.served_models import ServedModels
from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.store import Store


class EngineStates:
    def __init__(self, served: ServedModels, training: TrainingRequests, sampling: SamplingRequests):
        self._served, self._training, self._sampling = served, training, sampling

    def read(self) -> dict[str, str | None]:
        """Returns why each base model cannot be used fully now; None for those that can."""
        return {worker.name: self._trouble(worker) for worker in self._served}

    def troubles(self) -> dict[str, str]:
        return {name: why for name, why in self.read().items() if why is not None}

    def _trouble(self, worker: WorkerSupervisor) -> str | None:
        if not worker.link.is_up:
            return "the engine is not running"
        return None if self._sampling.runners[worker].is_up else "no sampler is available"

    def calls_waiting(self) -> dict[str, int]:
        """Returns how many samples of each base model have not begun."""
        return {worker.name: self._sampling.waiting(worker) for worker in self._served}

    def queues(self) -> list[RequestQueueState]:
        now = time.monotonic()
        train: dict[str, list[float]] = {worker.name: [] for worker in self._served}
        sample: dict[str, list[float]] = {worker.name: [] for worker in self._served}
        for model in self._training.models.values():
            train[model.worker.name] += [f.submitted for f in model.futures.values() if not f.is_done]
        for future in self._sampling.pending.values():
            sampler = self._sampling.samplers.get(future.sampler_id)
            if sampler is not None:
                sample[sampler.worker.name].append(future.submitted)
        return [
            RequestQueueState(name, kind, len(since), now - min(since, default=now))
            for kind, queues in (("train", train), ("sample", sample))
            for name, since in queues.items()
        ]


@dataclass(frozen=True, slots=True)
class ReadyState:
    waiting_for: list[str]
    """Base models that cannot be used fully now."""
    reasons: list[str]
    """Why the server is not ready; empty: it is."""


class Readiness:
    def __init__(self, store: Store, engines: EngineStates, disks: DiskHealth, shutdown: Shutdown):
        self._store, self._engines, self._disks, self._shutdown = store, engines, disks, shutdown

    async def read(self) -> ReadyState:
        away = self._engines.troubles()
        reasons = [f"{name}: {why}" for name, why in away.items()] + await self._disks.troubles()
        if why := await self._store.trouble():
            reasons.append(why)
        if self._shutdown.has_begun:
            reasons.append("the server is being stopped")
        return ReadyState(list(away), reasons)
