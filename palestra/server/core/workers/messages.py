"""Routes messages of workers to the parts that handle them.

Owns: the routing. Never touches: the handling.
"""

from __future__ import annotations

from palestra.server.core.checkpoints.adapter_transfers import AdapterTransfers
from palestra.server.core.checkpoints.snapshot_copies import SnapshotCopies
from palestra.server.core.samples.requests import SamplingRequests
from palestra.server.core.telemetry.metrics import Metrics
from palestra.server.core.training.journal_replay import Recovery
from palestra.server.core.training.requests import TrainingRequests
from palestra.server.core.workers.link import WorkerFrame
from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.server.core.workers.watchdog import RestartReason
from palestra.types.engine import (
    AdapterPart,
    AdapterRefused,
    Hello,
    Sampled,
    SamplerKept,
    SamplerSpooled,
    Saved,
    Snapshotted,
    Stats,
    Streamed,
    Trained,
)


class WorkerMessages:
    def __init__(
        self,
        training: TrainingRequests,
        sampling: SamplingRequests,
        adapters: AdapterTransfers,
        copies: SnapshotCopies | None,
        metrics: Metrics,
    ):
        self._training, self._sampling, self._adapters = training, sampling, adapters
        self._copies, self._metrics, self._recovery = copies, metrics, Recovery(training)

    def on_hello(self, worker: WorkerSupervisor, hello: Hello) -> None:
        self._metrics.worker_hello(worker.name, adopted=worker.is_adopted)
        self._recovery.on_hello(worker, hello)
        if self._copies is not None:
            self._copies.on_hello(worker, hello)
        self._sampling.on_hello(worker, hello.sampler_ids)
        self._sampling.runners[worker].on_worker_ready()

    def on_hello_again(self, worker: WorkerSupervisor, hello: Hello) -> None:
        """Handles a second Hello: the connection was interrupted, and what was sent meanwhile is sent again."""
        self._recovery.on_hello(worker, hello)
        if self._copies is not None:
            self._copies.on_hello(worker, hello)
        self._sampling.runners[worker].on_worker_ready()

    def on_message(self, worker: WorkerSupervisor, frame: WorkerFrame) -> None:
        match frame.message:
            case Streamed():
                self._sampling.on_streamed(frame.message)
            case Sampled():
                self._sampling.on_sampled(frame.message, frame.frame)
            case Trained():
                if isinstance(frame.message.outcome, SamplerKept | Saved):
                    self._on_kept(worker, frame.message.request_id)
                self._training.on_trained(worker, frame.message, frame.frame)
            case AdapterPart() | AdapterRefused():
                self._adapters.on_message(frame.message)
            case Snapshotted():
                self._training.on_snapshotted(frame.message)
                if self._copies is not None:
                    self._copies.on_snapshotted(worker, frame.message)
            case SamplerSpooled():
                if self._copies is not None:
                    self._copies.on_spooled(worker, frame.message)
            case Stats():
                self._metrics.worker_stats(worker.name, frame.message)
                self._sampling.runners[worker].on_stats(frame.message)

    def _on_kept(self, worker: WorkerSupervisor, request_id: str) -> None:
        """Handles frozen weights; a replay also brings back samplers that were dropped meanwhile."""
        future, runner = self._training.futures.get(request_id), self._sampling.runners[worker]
        sampler_id = future.reply.get("sampling_session_id", "") if future is not None else ""
        if sampler_id and sampler_id not in self._sampling.samplers:
            runner.drop([sampler_id])
        elif sampler_id:
            runner.prepare(self._sampling.samplers[sampler_id].weights)

    def on_exit(self, worker: WorkerSupervisor, ending: RestartReason) -> None:
        self._metrics.worker_gone(worker.name)
        self._metrics.worker_restarted(worker.name, ending)
        self._training.on_exit(worker, is_blameless=ending is RestartReason.MOVED)
        self._sampling.on_exit(worker)
