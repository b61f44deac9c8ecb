"""The parts of a running server: opened in one place, passed to the routes, closed in the reverse order.

    async with ServerServices.open(config, store) as services: …

Owns: the order of opening and closing. Never touches: HTTP, what the parts do.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from palestra.config.serve import ServeConfig
from palestra.server.agentjet.results import ResultPushes
from palestra.server.agentjet.trainer import AgentJetTrainer
from palestra.server.broker.service import EpisodeService
from palestra.server.core.core import Core
from palestra.server.core.maintenance import Maintenance
from palestra.server.core.restore import restore
from palestra.server.core.task_replays import TaskReplays
from palestra.server.engines import PreloadedWorkers, add_engines, open_cluster, open_replica_port, start_engine
from palestra.store import Journal, Store
from palestra.store.journal.open_journal import open_journal
from palestra.store.queries.settings import INSTALLATION, setting_once


class ServerServices:
    def __init__(self, config: ServeConfig, store: Store, journals: tuple[Journal, Journal], secret: str):
        self.config, self.store = config, store
        self.core = Core(config, store, journals, secret)
        self.episodes = EpisodeService(store, config.episodes, self.core.observer, secret, more_pushes=[ResultPushes])
        self.episodes.backpressure.waiting = self.core.calls_waiting
        self.episodes.claims.check_owner = self.core.quotas.check_tokens
        self.core.keys.on_end.append(self.episodes.end_keys)
        self.agentjet_trainer = AgentJetTrainer(config, store, self.episodes.broker)
        self.replays = TaskReplays(store)
        self._upkeep = Maintenance(self.core)
        self.replica_port = open_replica_port(self.core)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: ServeConfig,
        store: Store,
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
            services = cls(config, store, (requests, results), secret)
            core = services.core
            stack.callback(core.training.acknowledged.close)
            stack.callback(core.usage.close)
            stack.callback(core.observer.close)
            add_engines(core, preloaded or PreloadedWorkers(), await open_cluster(core, stack))
            installation = await store.write(lambda c: setting_once(c, INSTALLATION, lambda: secrets.token_hex(16)))
            await core.checkpoints.claim(installation)
            if core.copies is not None:
                await core.copies.claim(installation)
                await core.copies.open(core.all_workers, core.names_of)
            await restore(core)
            await stack.enter_async_context(services.episodes.running())
            stack.push_async_callback(services._close)
            before_engines(services)
            await asyncio.gather(*(start_engine(core, worker) for worker in core.all_workers))
            if core.copies is not None:
                await stack.enter_async_context(core.copies.running())
            await stack.enter_async_context(services.agentjet_trainer.running())
            await stack.enter_async_context(services.replays.running())
            await stack.enter_async_context(services._upkeep.running())
            yield services

    def begin_shutdown(self) -> None:
        """Answers waiting polls at once, and accepts no new requests."""
        self.core.begin_shutdown()
        self.episodes.begin_shutdown()

    async def _close(self) -> None:
        self.begin_shutdown()
        core = self.core
        await asyncio.gather(*(r.stop() for r in core.sampling.runners.values()), return_exceptions=True)
        if self.replica_port is not None:
            await self.replica_port.close()
        await core.adapters.close()
        await asyncio.gather(*(worker.stop() for worker in core.all_workers), return_exceptions=True)
        await core.training.writing.settle_down()
        await self._upkeep.flush()
