"""Everything that lives in a server, opened in one place and closed in the reverse order.

    async with Hub.open(config) as hub: …

Owns: the parts, what passes between them and the workers, work that recurs. Never touches: HTTP.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import structlog
from sqlalchemy import Connection

from palestra.config.serve import ModelConfig, ServeConfig, worker_config
from palestra.server.agentjet.trainer import Engine
from palestra.server.broker.service import Episodes
from palestra.server.core.checkpoints import Checkpoints
from palestra.server.core.disk import Disks
from palestra.server.core.futures import RequestKind, TrainFuture
from palestra.server.core.ledger import Ledger
from palestra.server.core.link import Heard, address_in
from palestra.server.core.lost_models import LostModels
from palestra.server.core.metrics import JournalState, Metrics, QueueState
from palestra.server.core.models import TrainedModel
from palestra.server.core.observer import Observer
from palestra.server.core.recovery import Recovery
from palestra.server.core.sample_runners import SampleRunner, WorkerRunner
from palestra.server.core.sampling import Sampler, Sampling
from palestra.server.core.sessions import Session, Sessions
from palestra.server.core.training import Training
from palestra.server.core.watchdog import Ending, Patience
from palestra.server.core.workers import Worker, WorkerError
from palestra.store import Journal, Store
from palestra.store import checkpoints as checkpoint_rows
from palestra.store import models as model_rows
from palestra.store import samplers as sampler_rows
from palestra.store import sessions as session_rows
from palestra.store.acknowledged import Acknowledged
from palestra.store.purge import purge
from palestra.store.records import ModelStatus
from palestra.store.settings import setting_once
from palestra.store.traces import Purge, purge_traces
from palestra.types.engine import (
    BaseModel,
    Failure,
    Hello,
    Kept,
    KeptSampler,
    Sampled,
    SampleWeights,
    Saved,
    SavedAdapter,
    Snapshotted,
    Stats,
    Streamed,
    Trained,
    TrainOutcome,
    encode_message,
)

log = structlog.get_logger()

FLUSH_S = 15.0  # heartbeats and last request times reach the database this often
SWEEP_S = 60.0
LOADED = (ModelStatus.PENDING, ModelStatus.READY)


class Hub:
    def __init__(self, config: ServeConfig, store: Store, journals: tuple[Journal, Journal], secret: str):
        self.config, self.store, self.secret = config, store, secret
        self.metrics = Metrics()
        self.observer = Observer.of(self.metrics, config.otlp_endpoint)
        self.sessions = Sessions()
        self.checkpoints = Checkpoints(store, config.checkpoints, keep_deleted_s=config.keep_deleted_s)
        self.training = Training(
            Ledger(*journals),
            Acknowledged(config.state / "acknowledged"),
            LostModels(store),
            self.observer,
            self._save_snapshot_seq,
            self._send_samples,
            gap_wait_s=config.gap_wait_s,
            keep_results_s=config.keep_results_s,
            max_pending_bytes=config.limits.max_pending_train_bytes,
        )
        self._recovery = Recovery(self.training)
        self.sampling = Sampling(
            self.observer,
            max_pending=config.limits.max_pending_samples,
            keep_results_s=config.keep_results_s,
        )
        self.episodes = Episodes(store, config.episodes, self.observer, secret)
        self.engine = Engine(config, store, self.episodes.broker)
        self.workers: dict[str, Worker] = {}
        """By each name a base model is served as."""
        self.disks = Disks(
            {
                "state folder": config.state,
                "checkpoints": config.checkpoints,
                **({"database": config.database_file.parent} if config.database_file is not None else {}),
            }
        )
        self.is_leaving = False
        saving = (
            RequestKind.SAVE_WEIGHTS,
            RequestKind.SAVE_WEIGHTS_FOR_SAMPLER,
            RequestKind.SAVE_WEIGHTS_EXTERNAL,
        )
        self.training.hooks.update(dict.fromkeys(saving, self.checkpoints.on_saved))
        self.training.hooks[RequestKind.CREATE_MODEL] = self._on_created
        self.episodes.pressure.waiting = self._calls_waiting
        self.metrics.watch_queues(self._queues)
        self.metrics.watch_journal(
            lambda: JournalState(sum(j.size_bytes for j in journals), sum(len(j.segments()) for j in journals))
        )

    @classmethod
    @asynccontextmanager
    async def open(cls, config: ServeConfig) -> AsyncIterator[Hub]:
        async with AsyncExitStack() as stack:
            config.state.mkdir(parents=True, exist_ok=True)
            store = Store.open(config.database, patience_s=config.write_wait_s)
            stack.push_async_callback(store.close)
            requests, results = (
                Journal.open(config.state / "journal" / name, patience_s=config.write_wait_s)
                for name in ("requests", "results")
            )
            stack.push_async_callback(requests.close)
            stack.push_async_callback(results.close)
            secret = await store.write(lambda c: setting_once(c, "server_secret", lambda: secrets.token_hex(32)))
            hub = cls(config, store, (requests, results), secret)
            stack.callback(hub.training.acknowledged.close)
            stack.callback(hub.observer.close)
            hub._make_workers()
            await hub._recover()
            await stack.enter_async_context(hub.episodes.running())
            stack.push_async_callback(hub._close)
            await asyncio.gather(*(hub._start(worker) for worker in hub.all_workers))
            await stack.enter_async_context(hub.engine.running())
            for work in (hub._flush_often, hub._sweep_often, hub._expire_often):
                task = asyncio.create_task(work(), name=work.__name__)
                stack.callback(task.cancel)
            yield hub

    @property
    def all_workers(self) -> list[Worker]:
        return list(dict.fromkeys(self.workers.values()))

    def base(self, name: str) -> Worker | None:
        """`name:variant` is served as its name."""
        return self.workers.get(name) or self.workers.get(name.partition(":")[0])

    def _make_workers(self) -> None:
        patience = Patience(
            start_s=self.config.worker_start_s,
            silence_s=self.config.worker_silence_s,
            stall_s=self.config.worker_stall_s,
        )
        for model in self.config.models:
            name = self._folder_name(model.name)
            if any(worker.config.state == str(self.config.state / name) for worker in self.all_workers):
                raise WorkerError(f"two models would share the state folder {name}; give one of them another name")
            state = self.config.state / name
            told = worker_config(self.config, model, address_in(self.config.state, name), state)
            log_file = self.config.state / "logs" / f"{name}.log"
            worker = Worker(
                model.name[0],
                told,
                self,
                log_file=log_file,
                patience=patience,
                write_wait_s=self.config.write_wait_s,
            )
            self.workers.update(dict.fromkeys(model.name, worker))
            self.sampling.runners[worker] = self._runner(worker, model)

    def _runner(self, worker: Worker, model: ModelConfig) -> SampleRunner:
        if model.sampler == "torch":
            return WorkerRunner(worker, lambda worker: self.training.lane(worker).is_narrow)
        from palestra.server.vllm.runner import VllmRunner

        return VllmRunner(
            worker,
            model,
            self.metrics,
            self.config.state,
            is_live=lambda sampler_id: sampler_id in self.sampling.samplers,
            until_saved=self._until_saved,
            on_sampled=lambda message: self.sampling.on_sampled(message, encode_message(message)),
            on_streamed=self.sampling.on_streamed,
        )

    async def _until_saved(self, kept: KeptSampler) -> None:
        """Or until it is sure that they never will be."""
        model = self.training.models.get(kept.model_id)
        future = model.futures.get(kept.seq_id) if model is not None else None
        while future is not None and not future.is_done and not self.is_leaving:
            await future.wait(SWEEP_S)

    async def _start(self, worker: Worker) -> None:
        await worker.start()
        await self.sampling.runners[worker].start()

    def _folder_name(self, names: list[str]) -> str:
        """By name, not by number: another model served from the same state must not meet this one's snapshots. Any of
        its names will do, so that they may be told in another order."""
        folders = ["worker-" + re.sub(r"[^A-Za-z0-9._-]", "_", name) for name in names]
        return next((f for f in folders if (self.config.state / f).is_dir()), folders[0])

    # From the workers

    def on_hello(self, worker: Worker, hello: Hello) -> None:
        self.metrics.worker_hello(worker.name, adopted=worker.is_adopted)
        self._recovery.on_hello(worker, hello)
        self.sampling.on_hello(worker, hello.sampler_ids)

    def on_hello_again(self, worker: Worker, hello: Hello) -> None:
        """The line was cut for a moment: what was said meanwhile is said again."""
        self._recovery.on_hello(worker, hello)

    def on_message(self, worker: Worker, heard: Heard) -> None:
        match heard.message:
            case Streamed():
                self.sampling.on_streamed(heard.message)
            case Sampled():
                self.sampling.on_sampled(heard.message, heard.frame)
            case Trained():
                if isinstance(heard.message.outcome, Kept | Saved):
                    self._on_kept(worker, heard.message.request_id)
                self.training.on_trained(worker, heard.message, heard.frame)
            case Snapshotted():
                self.training.on_snapshotted(heard.message)
            case Stats():
                self.metrics.worker_stats(worker.name, heard.message)
                self.sampling.runners[worker].on_stats(heard.message)

    def _on_kept(self, worker: Worker, request_id: str) -> None:
        """A replay also brings back samplers that were let go meanwhile."""
        future, runner = self.training.futures.get(request_id), self.sampling.runners[worker]
        sampler_id = future.reply.get("sampling_session_id", "") if future is not None else ""
        if sampler_id and sampler_id not in self.sampling.samplers:
            runner.drop([sampler_id])
        elif sampler_id:
            runner.prepare(self.sampling.samplers[sampler_id].weights)

    def on_exit(self, worker: Worker, ending: Ending) -> None:
        self.metrics.worker_gone(worker.name)
        self.metrics.worker_restarted(worker.name, ending)
        self.training.on_exit(worker)
        self.sampling.on_exit(worker)

    def _send_samples(self, worker: Worker) -> None:
        self.sampling.send_waiting(worker)

    async def _save_snapshot_seq(self, model_id: str, seq_id: int) -> None:
        await self.store.write(lambda c: model_rows.advance_snapshots(c, {model_id: seq_id}))

    async def _on_created(self, future: TrainFuture, outcome: TrainOutcome) -> None:
        failed = outcome.message if isinstance(outcome, Failure) else None
        status = ModelStatus.FAILED if failed else ModelStatus.READY
        await self.store.write(lambda c: model_rows.set_model_status(c, future.model_id, status, error=failed))
        model = self.training.models.get(future.model_id)
        if failed and model is not None:
            self.training.drop(model, failed)

    # Sessions end

    async def end_session(self, session: Session, reason: str, record: Callable[[], Awaitable[object]]) -> None:
        """Models and samplers are let go, then the session is over in short writes; if one fails, it is tried again."""
        self.sessions.active.pop(session.session_id, None)
        for model in [m for m in self.training.models.values() if m.session_id == session.session_id]:
            self.training.drop(model, reason)
        samplers = [s for s in self.sampling.samplers.values() if s.session_id == session.session_id]
        self.sampling.drop(samplers, reason)

        def write(c: Connection) -> None:
            rows = model_rows.models_of_session(c, session.session_id)
            self._unload_rows(c, [row.model_id for row in rows if row.status in LOADED], reason)
            sampler_rows.drop_samplers(
                c, [row.sampler_id for row in sampler_rows.samplers_of_session(c, session.session_id)]
            )

        try:
            await self.store.write(write)
            await record()
        except BaseException:
            self.sessions.active[session.session_id] = session
            raise

    async def unload(self, model: TrainedModel, reason: str) -> None:
        self.training.drop(model, reason)
        await self.store.write(lambda c: self._unload_rows(c, [model.model_id], reason))

    def _unload_rows(self, c: Connection, model_ids: list[str], reason: str) -> None:
        """Saves that were under way will never end."""
        for model_id in model_ids:
            model_rows.set_model_status(c, model_id, ModelStatus.UNLOADED)
        for save in checkpoint_rows.saves_under_way(c):
            if save.model_id in model_ids:
                checkpoint_rows.fail_checkpoint(c, save.request_id, error=reason)

    # What recurs

    async def _flush_often(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self._guarded(self.flush())

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_S, max(1.0, self.config.keep_results_s)))
            self.training.expire(time.time())
            self.sampling.expire(time.time())
            await self._guarded(self._sweep_checkpoints())
            for runner in self.sampling.runners.values():
                await self._guarded(asyncio.to_thread(runner.sweep))
            before = time.time() - self.config.keep_runs_s
            await self._guarded(self.store.write(lambda c, before=before: purge(c, before)))
            await self._guarded(self._sweep_traces())

    async def _sweep_traces(self) -> None:
        old = Purge(before=time.time() - self.config.keep_traces_s, max_turns=self.config.limits.max_turns)
        await self.store.write(lambda c: purge_traces(c, old))

    async def _sweep_checkpoints(self) -> None:
        await self.checkpoints.sweep(self.training.folders_to_load())

    async def _expire_often(self) -> None:
        while self.config.cleans_sessions:
            await asyncio.sleep(self.config.session_check_s)
            for session in self.sessions.stale(self.config.session_timeout_s):
                log.info("a session expired", session=session.session_id)
                await self._guarded(self._expire(session))

    async def _expire(self, session: Session) -> None:
        await self.end_session(
            session,
            "the session expired: no heartbeat arrived for too long",
            lambda: self.store.write(lambda c: session_rows.expire_session(c, session.session_id)),
        )

    async def _guarded(self, work: Awaitable[object]) -> None:
        try:
            await work
        except Exception:
            log.exception("recurring work failed; it comes again")

    async def flush(self) -> None:
        heartbeats = self.sessions.take_dirty()
        requests = {m.model_id: m.last_request_at for m in self.training.models.values()}

        def write(c: Connection) -> None:
            session_rows.touch_sessions(c, heartbeats)
            model_rows.touch_models(c, requests)

        await self.store.write(write)

    def _calls_waiting(self) -> dict[str, int]:
        return {worker.name: self.sampling.waiting(worker) for worker in self.all_workers}

    def _queues(self) -> list[QueueState]:
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
            QueueState(name, kind, len(since), now - min(since, default=now))
            for kind, queues in (("train", train), ("sample", sample))
            for name, since in queues.items()
        ]

    # Start and end

    async def _recover(self) -> None:
        """Sessions, models and samplers from the database, then the journal's requests into the models."""
        self.training.lost.restore(await self.store.read(model_rows.corrupted_models))
        for row in await self.store.read(session_rows.active_sessions):
            self.sessions.active[row.session_id] = Session(row.session_id, row.owner)
        for row in await self.store.read(lambda c: model_rows.models_in(c, LOADED)):
            worker = self.base(row.base_model)
            if worker is None:
                log.warning("a model's base is not served now", model=row.model_id, base_model=row.base_model)
                self.training.absent.add(row.model_id)
                continue
            self.training.models[row.model_id] = TrainedModel(
                row.model_id,
                row.session_id,
                row.owner,
                row.base_model,
                row.lora,
                worker,
                snapshot_seq=row.snapshot_seq,
                next_seq=row.snapshot_seq + 1,
                last_request_at=row.last_request_at,
            )
        for row in await self.store.read(sampler_rows.live_samplers):
            worker = self.base(row.base_model)
            if worker is not None:
                self.sampling.samplers[row.sampler_id] = Sampler(
                    row.sampler_id,
                    row.session_id,
                    row.owner,
                    row.base_model,
                    weights_of(row.sampler_id, row.model_id, row.seq_id, row.folder),
                    worker,
                    row.model_path,
                )
        self._recovery.run()
        live = {f.request_id for m in self.training.models.values() for f in m.futures.values()}
        await self.checkpoints.settle_after_restart(live, self.training.absent)

    def leave(self) -> None:
        """Held polls answer at once; nothing new is taken."""
        self.is_leaving = True
        self.episodes.leave()
        for future in (*self.training.futures.values(), *self.sampling.futures.values()):
            future.wake()

    async def _close(self) -> None:
        self.leave()
        await asyncio.gather(*(r.stop() for r in self.sampling.runners.values()), return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self.all_workers), return_exceptions=True)
        await self.training.writing.settle_down()
        await self._guarded(self.flush())


def weights_of(sampler_id: str, model_id: str | None, seq_id: int | None, folder: str | None) -> SampleWeights:
    if folder is not None:
        return SavedAdapter(folder=folder)
    if model_id is not None and seq_id is not None:
        return KeptSampler(sampler_id=sampler_id, model_id=model_id, seq_id=seq_id)
    return BaseModel()
