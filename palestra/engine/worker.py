"""The worker's loop: take in messages, compute one quantum, look after files; asleep when there is nothing to do.

Owns: the order of things, what each message sets off. Never touches: how any of it is done.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from palestra.engine.adapter_sending import AdapterSender
from palestra.engine.backend import ComputeBackend
from palestra.engine.checkpoint_folders import CheckpointFolders, LocalCheckpoints, RemoteCheckpoints
from palestra.engine.files import FileThread
from palestra.engine.heartbeat import HeartbeatSender
from palestra.engine.placed_adapters import PlacedAdapters
from palestra.engine.queues import ModelTable, QueuedModel
from palestra.engine.sampler_cache import SamplerCache, SamplerCopies
from palestra.engine.sampling import SamplingExecutor
from palestra.engine.server_link import Received, ServerLink
from palestra.engine.snapshot_uploads import SnapshotUploads
from palestra.engine.snapshots import Snapshots
from palestra.engine.stats import Counters, StatsClock
from palestra.engine.time_share import TimeShare, Work
from palestra.engine.training import TrainingExecutor
from palestra.engine.uploads import FileUploads
from palestra.types.engine import (
    AdapterPart,
    CancelSample,
    ChangeWeights,
    DropAdapters,
    DropModel,
    DropSamplers,
    FileStored,
    FromWorker,
    Hello,
    Leaving,
    OwnModel,
    Ping,
    PlaceAdapter,
    Sample,
    SendAdapter,
    Stats,
    Stop,
    Stored,
    Train,
    Welcome,
    WorkerConfig,
)

log = logging.getLogger(__name__)

IDLE_S = 3600.0  # the link has deadlines of its own
LAST_UPLOADS_S = 25.0  # less than the server waits for the end of a worker


@dataclass(frozen=True, slots=True)
class CopiedState:
    """The state of a worker on another machine that the server has."""

    is_new: bool
    """Whether the state here was fetched from there."""
    samplers: set[str]
    """Names of the files of samplers."""


class EngineWorker:
    def __init__(self, config: WorkerConfig, backend: ComputeBackend, copied: CopiedState | None = None):
        """`copied`: what the server has of this worker's state; None: the state is on the server's machine."""
        self.config, self.backend = config, backend
        state = Path(config.state)
        self.link = ServerLink(
            timeout_s=config.server_timeout_s,
            hello=self._hello,
            server_key=config.server_key,
            client_key=config.client_key,
        )
        self.heartbeat = HeartbeatSender(
            config.address, config.beat_every_s, self.link.worker_id, config.server_key, config.client_key
        )
        self.files = FileThread(self.link.wake)
        self.uploads = FileUploads(self.files, self._send)
        self.counters, self.clock = Counters(), StatsClock()
        self.table = ModelTable(self._send)
        self.checkpoints: CheckpointFolders = LocalCheckpoints(self.files)
        self.copies: SnapshotUploads | None = None
        sampler_copies: SamplerCopies | None = None
        if copied is not None and config.role == "trainer":  # a replica has nothing but the adapters that it is sent
            self.checkpoints = RemoteCheckpoints(config, state / "checkpoints", self.files, self.uploads)
            sampler_copies = SamplerCopies(self.uploads, copied.samplers)
            self.copies = SnapshotUploads(
                self.table,
                self.uploads,
                self._send,
                state,
                every_s=config.snapshot_copy_s,
                are_copies=copied.is_new,
            )
        self.sampler_cache = SamplerCache(
            backend,
            self.files,
            state / "samplers",
            memory_bytes=config.sampler_memory_bytes,
            find_folder=self.checkpoints.find,
            copies=sampler_copies,
        )
        self.sampler_cache.on_spooled = self._send
        if sampler_copies is not None:
            sampler_copies.add_missing(state / "samplers")
        self.placed = PlacedAdapters(self.sampler_cache, self.files, state / "adapters", self._send)
        self.sending = AdapterSender(backend, self.table, self.sampler_cache, self.files, self._send)
        self.samples = SamplingExecutor(
            backend,
            self.table,
            self.sampler_cache,
            self.counters,
            self._send,
            max_rows=backend.max_sample_rows,
            placed_folder=self.placed.folder_of,
        )
        self.training = TrainingExecutor(
            backend,
            self.table,
            self.sampler_cache,
            self.checkpoints,
            self.counters,
            max_models=config.max_models,
            on_applied=self._applied,
        )
        self.snapshots = Snapshots(
            backend,
            self.table,
            self.sampler_cache,
            self.files,
            self.counters,
            self._send,
            state / "models",
            every_s=config.snapshot_every_s,
            every_bytes=config.snapshot_every_bytes,
            allow_weights_mismatch=config.allow_weights_mismatch,
            allow_shard_mismatch=config.allow_shard_mismatch,
            allow_tensor_mismatch=config.allow_tensor_mismatch,
            allow_context_mismatch=config.allow_context_mismatch,
            copies=self.copies,
        )
        self.share = TimeShare(config.sample_share)
        self._epoch = ""
        self._stopping = False
        self._is_leaving = self._said_leaving = False
        """Whether a replica was asked to end, and has told the server."""

    def run(self) -> None:
        """Works until it is told to stop, or has heard of no server for too long."""
        self._watch_signals()
        self.snapshots.restore()
        self.link.open(self.config.address)
        self.heartbeat.start()
        log.info("ready models=%d samplers=%d", len(self.table.models), len(self.sampler_cache.kept))
        while not self._stopping:
            self.heartbeat.idle()
            messages = self.link.receive(0.0 if self._has_work else self._idle_s)
            self.heartbeat.busy("taking in messages")
            if not messages and self.link.is_lost:
                log.warning("no_server silent_s=%g", self.config.server_timeout_s)
                break
            for received in messages:
                self._take_in(received)
            if self._is_leaving and not self._said_leaving:
                self._said_leaving = True
                self._send(Leaving())
            self.files.collect()
            self.sending.send_some()
            worked = self._quantum()
            self.heartbeat.busy("copying for files")
            self.sampler_cache.make_room()
            self.snapshots.take_due()
            self.uploads.look()
            if self.copies is not None:
                self.copies.take_due()
            if self.clock.is_due(worked=worked, has_work=self._has_work):
                self._send(self._stats())
        self.heartbeat.busy("taking the last snapshots")
        self.snapshots.take_all()
        self._finish_uploads()
        self.files.close()
        self.heartbeat.stop()
        self.link.close()
        log.info("stopped")

    def _finish_uploads(self) -> None:
        """Finishes uploads before the end: the server waits for the last copies, as long as it waits for this
        process."""
        if self.copies is not None and not self.link.is_lost:
            self.copies.take_all()
        until = time.monotonic() + LAST_UPLOADS_S
        while self.uploads.pending and time.monotonic() < until and not self.link.is_lost:
            for received in self.link.receive(1.0):
                if isinstance(received.message, FileStored):
                    self.uploads.on_stored(received.message)
            self.files.collect()

    @property
    def _idle_s(self) -> float:
        copies_s = IDLE_S if self.copies is None else self.copies.next_s
        return max(0.0, min(self.snapshots.next_s, copies_s, self.uploads.next_s, IDLE_S))

    @property
    def _has_work(self) -> bool:
        return self.training.has_work or self.samples.has_work or self.sending.has_work

    def _quantum(self) -> bool:
        """Whether there was anything to compute."""
        work = self.share.next(train=self.training.has_work, sample=self.samples.has_work)
        if work is None:
            return False
        self.heartbeat.busy("training" if work is Work.TRAIN else "sampling")
        start = time.perf_counter()
        if work is Work.TRAIN:
            self.training.quantum()
        else:
            self.samples.quantum(self.config.quantum_s)
        seconds = time.perf_counter() - start
        self.share.charge(work, seconds)
        if work is Work.TRAIN:
            self.counters.train_s += seconds
        else:
            self.counters.sample_s += seconds
        return True

    def _take_in(self, received: Received) -> None:
        match received.message:
            case Train() as train:
                self.table.accept(train, received.size_bytes)
            case Sample() as sample:
                self.samples.add(sample)
            case CancelSample(request_id=request_id):
                self.samples.cancel(request_id)
            case ChangeWeights() as change:
                self.samples.change_weights(change)
            case Stored(request_ids=request_ids):
                self.table.stored(request_ids)
            case DropSamplers(sampler_ids=sampler_ids):
                self.sampler_cache.drop(sampler_ids)
            case OwnModel(model_id=model_id, owner=owner):
                self.table.set_owner(model_id, owner)
            case DropModel(model_id=model_id):
                self._drop(model_id)
            case Welcome(epoch=epoch):
                self._welcomed(epoch)
            case SendAdapter() as request:
                self.sending.add(request)
            case PlaceAdapter() as place:
                self.placed.place(place)
            case AdapterPart() as part:
                self.placed.take(part)
            case DropAdapters(digests=digests):
                self.placed.drop(digests)
            case FileStored() as stored:
                self.uploads.on_stored(stored)
            case Stop():
                self._stopping = True
            case Ping():
                pass

    def _welcomed(self, epoch: str) -> None:
        if epoch != self._epoch:
            log.info("welcome epoch=%s", epoch)
            self._epoch = epoch
            self.samples.abort_all()
            self.sending.forget_all()
            self.placed.forget_fetches()
            self.uploads.restart()
            self._said_leaving = False

    def _applied(self, model: QueuedModel) -> None:
        self.samples.recheck(model.model_id)
        self.sending.recheck(model.model_id)
        self.snapshots.on_applied(model)

    def _drop(self, model_id: str) -> None:
        model = self.table.drop(model_id)
        if model is None:
            return
        self.sampler_cache.orphan(model_id)
        self.snapshots.drop(model)
        if model.weights is not None:
            self.backend.free(model.weights)
        self.samples.recheck(model_id)
        self.sending.recheck(model_id)

    def _send(self, message: FromWorker) -> None:
        self.link.send(message)

    def _hello(self, worker_id: str) -> Hello:
        return Hello(
            pid=os.getpid(),
            worker_id=worker_id,
            card=self.backend.card,
            models=self.table.states(),
            sampler_ids=list(self.sampler_cache.kept),
            unstored=list(self.table.unstored.values()),
            snapshots=self.snapshots.newest(),
            spooled=self.sampler_cache.spooled(),
            placed=sorted(self.placed.digests),
            ticket=self.config.ticket,
            life=self.config.life,
        )

    def _stats(self) -> Stats:
        load = self.backend.load_now()
        return Stats(
            queued_train=self.table.queued,
            running_samples=load.running_samples,
            waiting_samples=load.waiting_samples + self.samples.waiting,
            models=len(self.table.models),
            adapter_bytes=load.adapter_bytes,
            kept_samplers=len(self.sampler_cache.kept),
            sampler_bytes=self.sampler_cache.bytes_in_memory,
            kv_used=load.kv_used,
            cache_tokens=load.cache_tokens,
            token_gap_p95_s=self.samples.token_gap_p95_s,
            **self.counters.as_dict(),
        )

    def _watch_signals(self) -> None:
        def stop(*_: object) -> None:
            if self.config.role == "sampler" and self.link.epoch and not self._is_leaving:
                self._is_leaving = True  # a second signal ends it at once
            else:
                self._stopping = True

        signal.signal(signal.SIGTERM, stop)
        # The server owns the terminal, unless it is elsewhere.
        signal.signal(signal.SIGINT, signal.SIG_IGN if self.config.ticket is None else stop)
        signal.set_wakeup_fd(self.link.wake_fd, warn_on_full_buffer=False)
