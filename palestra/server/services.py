"""The services of a server: built in one place, each from those that it uses; opened, and closed in the reverse order.

    async with ServerServices.open(config, store) as services: …

Only `app` and `main` see all of them; everything else takes its own.

A service takes what it uses as arguments, and nothing but `app` and `main` takes `ServerServices`. With TLS our own
processes use `own_url`, plain HTTP on loopback.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf

from palestra.config.serve import ServeConfig
from palestra.server.agentjet.results import ResultPushes
from palestra.server.agentjet.trainer import AgentJetTrainer
from palestra.server.broker.service import EpisodeService
from palestra.server.core.checkpoints.adapter_transfers import AdapterTransfers
from palestra.server.core.checkpoints.files import CheckpointFiles
from palestra.server.core.checkpoints.snapshot_copies import SnapshotCopies
from palestra.server.core.checkpoints.storage import CheckpointStorage
from palestra.server.core.lookup import Lookup
from palestra.server.core.maintenance import LastUses, OwnerWatch, SessionExpiry, Sweeper, running
from palestra.server.core.owners.key_watch import KeyWatch
from palestra.server.core.owners.owner_states import OwnerStates
from palestra.server.core.owners.quotas import OwnerQuotas
from palestra.server.core.owners.usage import UsageAccount
from palestra.server.core.pictures.picture_cache import PictureCache
from palestra.server.core.pictures.reader import PictureReader
from palestra.server.core.restore import restore
from palestra.server.core.samples.requests import SamplingRequests
from palestra.server.core.samples.samplers import SamplingSessions
from palestra.server.core.sessions import TinkerSessions
from palestra.server.core.shutdown import Shutdown
from palestra.server.core.task_replays import TaskReplays
from palestra.server.core.teardown import Teardown
from palestra.server.core.telemetry.activity import Activity
from palestra.server.core.telemetry.disk_health import DiskHealth
from palestra.server.core.telemetry.metrics import JournalState, Metrics
from palestra.server.core.telemetry.observer import CallObserver
from palestra.server.core.telemetry.readiness import EngineStates, Readiness
from palestra.server.core.training.request_journal import RequestJournal
from palestra.server.core.training.requests import TrainingRequests
from palestra.server.core.workers.messages import WorkerMessages
from palestra.server.engine_api import EngineApi
from palestra.server.engines import (
    PreloadedWorkers,
    RunnerFactory,
    WorkerCluster,
    make_workers,
    open_cluster,
    open_replica_port,
    replica_key,
    start_engine,
)
from palestra.server.http.auth import Authenticator
from palestra.server.model_api.engine_sampler import EngineSampler
from palestra.server.model_api.model_resolver import ModelResolver
from palestra.server.model_api.service import ModelApi
from palestra.server.pages.parts import PageParts
from palestra.server.pages.server_state import ServerReader
from palestra.server.tinker.copies import CheckpointCopies
from palestra.server.tinker.imports import WeightImports
from palestra.server.tinker.model_service import ModelService
from palestra.server.tinker.rest_service import RestService
from palestra.server.tinker.result_service import ResultService
from palestra.server.tinker.sampling_service import SamplingService
from palestra.server.tinker.service import TinkerService
from palestra.server.tinker.session_service import SessionService
from palestra.server.tinker.training_service import TrainingService
from palestra.store import Journal, Store
from palestra.store.journal.acknowledged import AcknowledgedRequests
from palestra.store.journal.open_journal import open_journal
from palestra.store.queries.settings import INSTALLATION, setting_once
from palestra.store.usage_log import UsageLog


class ServerServices:
    def __init__(
        self,
        config: ServeConfig,
        store: Store,
        journals: tuple[Journal, Journal],
        secret: str,
        *,
        own_url: str = "",
        preloaded: PreloadedWorkers | None = None,
        cluster: WorkerCluster | None = None,
    ):
        """`own_url` is the address at which processes on this machine reach the server."""
        self.config, self.store = config, store
        limits = config.limits

        # What is measured, who may use how much
        self.metrics = metrics = Metrics()
        self.observer = observer = CallObserver.of(metrics, config.otlp_endpoint)
        self.usage = usage = UsageAccount(store, UsageLog(config.state / "usage.log"), metrics)
        self.quotas = quotas = OwnerQuotas(store, usage, metrics)
        self.keys = keys = KeyWatch(store)
        disks = DiskHealth.of(config)
        self.shutdown = shutdown = Shutdown(config.poll_hold_s)

        # Requests: sessions, samples, training, and the files that they need
        self.sessions = sessions = TinkerSessions()
        url = config.checkpoint_url
        self.checkpoints = checkpoints = CheckpointFiles(
            store,
            config.checkpoint_folder,
            keep_deleted_s=config.keep_deleted_s,
            max_bytes=lambda owner: quotas.of(owner).checkpoint_bytes,
            write_wait_s=config.write_wait_s,
            storage=None if url is None else CheckpointStorage(url, max_cache_bytes=limits.max_checkpoint_cache_bytes),
        )
        self.copies = copies = (
            None if config.snapshots is None else SnapshotCopies(store, config.snapshots, config.state)
        )
        self.sampling = sampling = SamplingRequests(
            observer,
            quotas,
            usage,
            max_pending=limits.max_pending_samples,
            max_picture_bytes=limits.max_pending_picture_bytes,
            keep_results_s=config.keep_results_s,
            max_routing_bytes=limits.max_routing_bytes,
        )
        self.training = training = TrainingRequests(
            store,
            RequestJournal(*journals, checkpoints.locate),
            AcknowledgedRequests(config.state / "acknowledged"),
            observer,
            quotas,
            usage,
            on_saved=checkpoints.on_saved,
            on_lifted=sampling.on_lifted,
            copied_seq=(lambda _: inf) if copies is None else copies.copied_seq,
            gap_wait_s=config.gap_wait_s,
            keep_results_s=config.keep_results_s,
            max_pending_bytes=limits.max_pending_train_bytes,
        )
        teardown = Teardown(store, sessions, training, sampling)

        # Engines. Runners report to `sampling`, which sends to them: it is the one service that is completed later.
        own_key = replica_key(secret)
        self.adapters = adapters = AdapterTransfers(
            config.state / "adapters", max_bytes=limits.max_adapter_bytes, is_held=training.is_held
        )
        messages = WorkerMessages(training, sampling, adapters, copies, metrics)
        self.served = served = make_workers(config, messages, preloaded or PreloadedWorkers(), cluster)
        runners = RunnerFactory(
            config,
            sampling,
            adapters,
            metrics,
            cluster,
            is_held=training.is_held,
            own_url=own_url,
            own_key=own_key,
        )
        for model in config.models:
            worker = served.by_name[model.name[0]]
            sampling.runners[worker] = runners.make(worker, model)
        self.replica_port = open_replica_port(config, secret, served, sampling.runners, keys.is_valid)
        self.engines = engines = EngineStates(served, training, sampling)
        activity = Activity(metrics, engines.queues)
        self.readiness = Readiness(store, engines, disks, shutdown)
        kept = PictureCache(
            config.state / "pictures", limits.max_kept_picture_bytes, lambda owner: quotas.of(owner).picture_bytes
        )
        self.pictures = pictures = PictureReader(limits, kept, config.picture_hosts)
        self.owners = OwnerStates(store, training, sampling, quotas, usage, kept)
        metrics.watch_queues(engines.queues)
        metrics.watch_journal(
            lambda: JournalState(sum(j.size_bytes for j in journals), sum(j.file_count for j in journals))
        )

        # Protocols, and who may call them
        lookup = Lookup(served, sessions, training, sampling, metrics, shutdown)
        samplers = SamplingSessions(store, lookup, sessions, sampling, checkpoints, metrics, pictures)
        self.tinker = TinkerService(
            sessions=SessionService(store, served, sessions, teardown),
            models=ModelService(
                store,
                lookup,
                served,
                sessions,
                training,
                sampling,
                checkpoints,
                quotas,
                teardown,
                max_models=limits.max_models,
                is_loopback=config.is_loopback,
            ),
            training=TrainingService(lookup, served, training, sampling, samplers, checkpoints, pictures),
            sampling=SamplingService(lookup, sampling, samplers, checkpoints),
            results=ResultService(lookup, training, sampling, metrics, shutdown),
            rest=RestService(store, training, checkpoints, secret),
            copies=CheckpointCopies(store, checkpoints, sessions, secret),
            imports=WeightImports(store, served, checkpoints, secret),
        )
        self.episodes = episodes = EpisodeService(
            store,
            config.episodes,
            observer,
            secret,
            pictures.cache,
            calls_waiting=engines.calls_waiting,
            check_owner=quotas.check_tokens,
            more_pushes=[ResultPushes],
        )
        models = ModelResolver(config.models, store, served, sampling, checkpoints, episodes.calls)
        engine_sampler = EngineSampler(sampling, samplers, episodes.calls, shutdown)
        self.model_api = ModelApi(config, store, models, engine_sampler, episodes, metrics, pictures)
        self.engine_api = EngineApi(config, served, sampling.runners, adapters, self.replica_port, own_key)
        self.agentjet_trainer = AgentJetTrainer(config, store, episodes.broker, own_url)
        self.authenticator = Authenticator(
            store,
            episodes.broker.keys.find,
            keys.uses,
            is_loopback=config.is_loopback,
            require_key=config.require_key == "always",
        )

        # The dashboard
        self.replays = TaskReplays(store)
        self.pages = PageParts(
            runs=config.runs,
            gym=config.gym,
            secret=secret,
            store=store,
            authenticator=self.authenticator,
            key_uses=keys.uses,
            model_api=self.model_api,
            episodes=episodes,
            replays=self.replays,
            server=ServerReader(config.models, served, engines, sessions, training, sampling, activity, disks, metrics),
            activity=activity,
            owners=self.owners,
            quotas=quotas,
            usage=usage,
            shutdown=shutdown,
        )

        # Recurring work
        key_holders = [episodes] if self.replica_port is None else [episodes, self.replica_port]
        self._last_uses = LastUses(store, sessions, training, keys, usage)
        self._recurring = (
            self._last_uses.flush_often,
            OwnerWatch(usage, quotas, keys, [holder.end_keys for holder in key_holders]).watch_often,
            Sweeper(config, store, training, sampling, checkpoints).sweep_often,
            SessionExpiry(config, store, sessions, teardown).expire_often,
            activity.record_often,
        )

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: ServeConfig,
        store: Store,
        *,
        own_url: str = "",
        before_engines: Callable[[ServerServices], None] = lambda _: None,
        preloaded: PreloadedWorkers | None = None,
    ) -> AsyncIterator[ServerServices]:
        """`before_engines` is called when all but the engines is there. The store is closed at the end."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(store.close)
            await store.take_place()
            config.state.mkdir(parents=True, exist_ok=True)
            requests, results = [
                await stack.enter_async_context(
                    await open_journal(
                        config.journal,
                        name,
                        config.state / "journal" / name,
                        store,
                        patience_s=config.write_wait_s,
                    )
                )
                for name in ("requests", "results")
            ]
            secret = await store.write(lambda c: setting_once(c, "server_secret", lambda: secrets.token_hex(32)))
            cluster = await open_cluster(config, secret, stack)
            services = cls(
                config, store, (requests, results), secret, own_url=own_url, preloaded=preloaded, cluster=cluster
            )
            stack.callback(services.training.acknowledged.close)
            stack.callback(services.usage.close)
            stack.callback(services.observer.close)
            await services._restore()
            await stack.enter_async_context(services.episodes.running())
            stack.push_async_callback(services._close)
            before_engines(services)
            runners = services.sampling.runners
            await asyncio.gather(*(start_engine(worker, runners[worker]) for worker in services.served))
            if services.copies is not None:
                await stack.enter_async_context(services.copies.running(services.training.on_copied))
            await stack.enter_async_context(services.agentjet_trainer.running())
            await stack.enter_async_context(services.replays.running())
            await stack.enter_async_context(running(*services._recurring))
            yield services

    async def _restore(self) -> None:
        """Goes on where an earlier server has stopped."""
        installation = await self.store.write(lambda c: setting_once(c, INSTALLATION, lambda: secrets.token_hex(16)))
        await self.checkpoints.claim(installation)
        if self.copies is not None:
            await self.copies.claim(installation)
            await self.copies.open(self.served.workers, self.served.names_of)
        await self.quotas.read()
        await self.keys.read()
        await restore(
            self.store, self.served, self.sessions, self.training, self.sampling, self.checkpoints, self.usage
        )

    def begin_shutdown(self) -> None:
        """Answers waiting polls at once, and accepts no new requests."""
        self.shutdown.begin()
        self.training.wake()
        self.sampling.wake()
        self.episodes.begin_shutdown()

    async def _close(self) -> None:
        self.begin_shutdown()
        await asyncio.gather(*(r.stop() for r in self.sampling.runners.values()), return_exceptions=True)
        if self.replica_port is not None:
            await self.replica_port.close()
        await self.adapters.close()
        await asyncio.gather(*(worker.stop() for worker in self.served), return_exceptions=True)
        await self.training.writing.settle_down()
        await self.pictures.close()
        await self._last_uses.flush()
