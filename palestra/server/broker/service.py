"""Episodes in a server: the broker and those who use it, put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import replace

from palestra.config.serve import EpisodesConfig
from palestra.server.broker.broker import Broker
from palestra.server.broker.claims import Claims
from palestra.server.broker.deliveries import Deliveries
from palestra.server.broker.masking import Masking
from palestra.server.broker.model_calls import EpisodeCalls
from palestra.server.broker.observer import EpisodeObserver
from palestra.server.broker.pressure import Pressure
from palestra.server.broker.push import MakeLooker, Pushes, RunPushes
from palestra.server.broker.push_errands import Errands
from palestra.server.broker.timelines import Timelines
from palestra.server.core.observer import Observer
from palestra.store import Store
from palestra.types.episodes import Held, RunInfo


class Episodes:
    def __init__(
        self,
        store: Store,
        config: EpisodesConfig,
        observer: Observer,
        secret: str,
        *,
        more_pushes: Sequence[MakeLooker] = (),
    ):
        watch = EpisodeObserver(observer.metrics.registry, observer.traces)
        self.broker = Broker(store, config, watch, secret)
        self.pressure = Pressure(config.max_calls_waiting)
        self.claims = Claims(self.broker, self.pressure)
        self.deliveries = Deliveries(self.broker, store)
        self.masking = Masking(config.mask)
        self.timelines = Timelines(self.broker, store, self.masking)
        self.calls = EpisodeCalls(self.broker)
        errands = Errands()
        self.listeners = RunPushes(self.broker, self.deliveries, errands)
        others = [make(self.broker, self.deliveries, errands) for make in more_pushes]
        self.pushes = Pushes(self.broker, errands, (self.listeners, *others))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.broker.running(), self.pushes.running():
            watching = asyncio.create_task(self.pressure.watch(self.broker.look_again), name="engine pressure")
            try:
                yield
            finally:
                watching.cancel()
                await self.masking.close()

    def with_calls(self, owner: str, info: RunInfo) -> RunInfo:
        full = self.pressure.full().get(self.broker.board.engine_of(owner, info.run))
        held = info.held or (f"{Held.ENGINE_FULL}: {full}" if full else "")
        return replace(info, calls_running=self.calls.running[owner, info.run], held=held)

    def leave(self) -> None:
        self.broker.leave()
