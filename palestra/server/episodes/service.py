"""Episodes in a server: the broker and those who use it, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from palestra.config.serve import EpisodesConfig
from palestra.server.episodes.broker import Broker
from palestra.server.episodes.claims import Claims
from palestra.server.episodes.deliveries import Deliveries
from palestra.server.episodes.model_calls import EpisodeCalls
from palestra.server.episodes.observer import EpisodeObserver
from palestra.server.episodes.push import Pushes, RunPushes
from palestra.server.episodes.push_errands import Errands
from palestra.server.metrics import Metrics
from palestra.server.tinkerscript.results import ResultPushes
from palestra.store import Store
from palestra.types.episodes import RunInfo


class Episodes:
    def __init__(self, store: Store, config: EpisodesConfig, metrics: Metrics, secret: str):
        self.broker = Broker(store, config, EpisodeObserver(metrics.registry), secret)
        self.claims = Claims(self.broker)
        self.deliveries = Deliveries(self.broker, store)
        self.calls = EpisodeCalls(self.broker)
        errands = Errands()
        self.listeners = RunPushes(self.broker, self.deliveries, errands)
        results = ResultPushes(self.broker, self.deliveries, errands)
        self.pushes = Pushes(self.broker, errands, (self.listeners, results))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.broker.running(), self.pushes.running():
            yield

    def with_calls(self, owner: str, info: RunInfo) -> RunInfo:
        return replace(info, calls_running=self.calls.running[owner, info.run])

    def leave(self) -> None:
        self.broker.leave()
