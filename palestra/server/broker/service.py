"""The episode service of a server: the broker and the parts around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import replace

from palestra.config.serve import EpisodesConfig
from palestra.episodes.board import EpisodeBoard
from palestra.server.broker.backpressure import Backpressure
from palestra.server.broker.broker import Broker
from palestra.server.broker.claims import ClaimService
from palestra.server.broker.deliveries import Deliveries
from palestra.server.broker.masking import Masking
from palestra.server.broker.model_calls import EpisodeCalls
from palestra.server.broker.observer import EpisodeObserver
from palestra.server.broker.push import GroupPushes, MakeGroupPusher, RunPushes
from palestra.server.broker.push_retries import RetriedPushes
from palestra.server.broker.timelines import Timelines
from palestra.server.core.pictures.picture_cache import PictureCache
from palestra.server.core.telemetry.observer import CallObserver
from palestra.store import Store
from palestra.types.episode_wire import Cancel
from palestra.types.episodes import ClaimBlocker, RunInfo


class EpisodeService:
    def __init__(
        self,
        store: Store,
        config: EpisodesConfig,
        observer: CallObserver,
        secret: str,
        pictures: PictureCache,
        *,
        calls_waiting: Callable[[], Mapping[str, int]],
        check_owner: Callable[[str], None],
        more_pushes: Sequence[MakeGroupPusher] = (),
    ):
        """`calls_waiting` returns how many model calls wait, by the base model's name; `check_owner` refuses owners
        whose players could not sample now."""
        watch = EpisodeObserver(observer.metrics.registry, observer.traces)
        self.broker = Broker(store, config, watch, secret)
        self.backpressure = Backpressure(config.max_calls_waiting, calls_waiting)
        self.claims = ClaimService(self.broker, self.backpressure, check_owner)
        self.deliveries = Deliveries(self.broker, store)
        self.masking = Masking(config.mask)
        self.timelines = Timelines(self.broker, store, self.masking)
        self.calls = EpisodeCalls(self.broker)
        self.pictures = pictures
        pushes = RetriedPushes()
        self.listeners = RunPushes(self.broker, self.deliveries, pushes)
        others = [make(self.broker, self.deliveries, pushes) for make in more_pushes]
        self.pushes = GroupPushes(self.broker, pushes, (self.listeners, *others))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.broker.running(), self.pushes.running():
            watching = asyncio.create_task(self.backpressure.watch(self.broker.look_again), name="engine pressure")
            try:
                yield
            finally:
                watching.cancel()
                await self.masking.close()

    def with_calls(self, owner: str, info: RunInfo) -> RunInfo:
        full = self.backpressure.full().get(self.broker.board.engine_of(owner, info.run))
        reason = info.held or (f"{ClaimBlocker.ENGINE_FULL}: {full}" if full else "")
        return replace(info, calls_running=self.calls.running[owner, info.run], held=reason)

    def end_keys(self, key_ids: set[int]) -> None:
        """Takes back the episodes that players with these keys hold: others may play them."""

        def release(board: EpisodeBoard, now: float) -> None:
            for lease in board.leases():
                key, is_keyed, _ = lease.client_id.partition(":")
                if is_keyed and key.isdecimal() and int(key) in key_ids:
                    board.release(lease.owner, lease.client_id, [lease.ref], "its player's key has ended", now)

        self.broker.apply(release)

    async def cancel(self, owner: str, request: Cancel) -> int:
        """Cancels episodes or groups of a run and returns the number of episodes."""
        cancelled = await self.broker.do_in_parts(
            lambda board, now: board.cancel_in_parts(
                owner,
                request.run,
                now,
                episode_ids=request.episode_ids,
                group_ids=request.group_ids,
                reason=request.reason,
            )
        )
        self.broker.observer.changed("episodes cancelled", owner, request.run, count=cancelled, reason=request.reason)
        return cancelled

    async def requeue(self, owner: str, episode_ids: Sequence[str]) -> int:
        """Puts parked episodes back into the queue."""
        requeued = await self.broker.do(lambda board, now: board.requeue(owner, episode_ids, now))
        self.broker.observer.requeued(owner, episode_ids)
        return requeued

    def begin_shutdown(self) -> None:
        self.broker.begin_shutdown()
