"""The same for event loops.

Only single exchanges are in threads, of executors of this client's own; waiting and repeating is the loop's, so
whatever is awaited can be cancelled at once. A second HTTP client, on asyncio streams, would be another set of faults.

Owns: the threads. Never touches: what the sync client has: leases, heartbeat, identity.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import SupportsFloat, TypeVar, Unpack

from palestra.episodes.client import api
from palestra.episodes.client.async_episode import AsyncEpisode
from palestra.episodes.client.async_run import AsyncRun
from palestra.episodes.client.calls import RETRY_S
from palestra.episodes.client.client import ClaimPace, EpisodeClient, as_result, new_id, too_late
from palestra.episodes.client.episode import GOODBYE_S, OnError
from palestra.episodes.client.errors import EpisodeApiError, NoEpisode
from palestra.episodes.client.heartbeat import Held
from palestra.types.episodes import (
    Ended,
    EpisodeInfo,
    EpisodeKind,
    EpisodeResult,
    EpisodeState,
    RunInfo,
    RunSettings,
)
from palestra.types.timelines import EpisodeTimeline

T = TypeVar("T")

POLL_S = 5.0  # a thread that waits cannot be interrupted, and the interpreter ends after it
POLL_THREADS, CALL_THREADS = 64, 16
"""Apart, so that results never stand in line behind claims that wait."""


class AsyncEpisodeClient:
    """For one event loop at a time; otherwise as EpisodeClient, with `await` and `async with`."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        client_id: str | None = None,
        retry_s: float = RETRY_S,
        tls: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ):
        self._share(EpisodeClient(url, key, client_id=client_id, retry_s=retry_s, tls=tls, proxy=proxy))

    @classmethod
    def beside(cls, sync: EpisodeClient) -> AsyncEpisodeClient:
        """The same client, for its async players: same identity, same leases."""
        beside = cls.__new__(cls)
        beside._share(sync)
        return beside

    def _share(self, sync: EpisodeClient) -> None:
        self.sync = sync
        self._polls = ThreadPoolExecutor(POLL_THREADS, thread_name_prefix="episode-poll")
        self._calls = ThreadPoolExecutor(CALL_THREADS, thread_name_prefix="episode-call")

    @property
    def url(self) -> str:
        return self.sync.url

    @property
    def client_id(self) -> str:
        return self.sync.client_id

    async def do(
        self,
        call: api.Call[T],
        *,
        retry_s: float | None = None,
        waits: bool = False,
        orphan: Callable[[T], None] | None = None,
    ) -> T:
        threads = self._polls if waits else self._calls
        return await self.sync.calls.do_async(call, threads, retry_s=retry_s, orphan=orphan)

    # Playing

    @asynccontextmanager
    async def episode(
        self,
        run: str | None = None,
        kind: EpisodeKind | str | None = None,
        *,
        wait_s: float | None = None,
        lease_s: float | None = None,
        on_error: OnError | str = OnError.END,
    ) -> AsyncIterator[AsyncEpisode]:
        """As EpisodeClient.episode; a task that is cancelled releases it."""
        on_error = OnError(on_error)
        found = await self.claim(1, run=run, kind=kind, wait_s=wait_s, lease_s=lease_s)
        if not found:
            raise NoEpisode(f"no episode within {wait_s:g} s" + (f" in run {run!r}" if run else ""))
        episode = found[0]
        try:
            yield episode
        except BaseException as error:
            await episode.leave(error, on_error)
            raise
        else:
            await episode.leave()

    async def claim(
        self,
        max_n: int = 1,
        *,
        run: str | None = None,
        kind: EpisodeKind | str | None = None,
        wait_s: float | None = None,
        lease_s: float | None = None,
    ) -> list[AsyncEpisode]:
        """As EpisodeClient.claim. Cancelled, it gives back what the request under way still brings."""
        pace = ClaimPace(wait_s, POLL_S)
        while True:
            request = api.claim_request(
                self.client_id, new_id(), run=run, kind=kind, max_n=max_n, lease_s=lease_s, wait_s=pace.begin()
            )
            try:
                told = await self.do(api.claim(request), waits=True, orphan=self._refuse)
            except EpisodeApiError as error:
                told = too_late(error)
            if told.leases:
                return [AsyncEpisode(held, self) for held in self.sync.hold(told.leases)]
            if (pause_s := pace.pause(told)) is None:
                return []
            await asyncio.sleep(pause_s)

    async def end_many(self, ends: Iterable[tuple[AsyncEpisode, EpisodeResult | SupportsFloat]]) -> list[Ended]:
        """As EpisodeClient.end_many."""
        pairs = [(episode, as_result(result)) for episode, result in ends]
        told: list[Ended] = []
        for batch in api.batches([episode.end_request(result) for episode, result in pairs]):
            told += (await self.do(api.end(self.client_id, batch))).ended
        self.sync.settle_all([episode for episode, _ in pairs], told)
        return told

    def _refuse(self, claimed: api.Claimed) -> None:
        """Whoever wanted these has been cancelled."""
        for batch in api.batches([Held.of(lease).ref for lease in claimed.leases]):
            self.sync.calls.do(api.release(self.client_id, batch, "the claim was cancelled"), retry_s=GOODBYE_S)

    # Training and looking on

    async def run(self, name: str, settings: RunSettings | None = None, *, model: str | None = None) -> AsyncRun:
        """Makes it, or changes what is given of one that exists."""
        return AsyncRun(self.do, await self.do(api.put_run(name, settings, model)))

    async def runs(self) -> list[RunInfo]:
        return (await self.do(api.get_runs())).runs

    async def run_info(self, name: str) -> RunInfo:
        return await self.do(api.get_run(name))

    async def delete_run(self, name: str) -> int:
        return (await self.do(api.delete_run(name))).deleted

    async def episodes(
        self,
        run: str | None = None,
        state: EpisodeState | str | None = None,
        *,
        limit: int = 100,
        offset: int = 0,
        **which: Unpack[api.Which],
    ) -> api.EpisodeList:
        """Those that are not committed, in the order of registration; `which`: by reward, error or task."""
        return await self.do(api.list_episodes(run, state, limit=limit, offset=offset, **which))

    async def episode_info(self, episode_id: str) -> EpisodeInfo:
        return await self.do(api.get_episode(episode_id))

    async def timeline(self, episode_id: str) -> EpisodeTimeline:
        """With the model calls and tools of its attempts. Secrets are blacked out."""
        return await self.do(api.get_timeline(episode_id))

    async def requeue(self, episode_ids: Sequence[str]) -> int:
        return (await self.do(api.requeue(episode_ids))).requeued

    async def cancel(
        self,
        run: str,
        *,
        episode_ids: Sequence[str] | None = None,
        group_ids: Sequence[str] | None = None,
        reason: str = "cancelled",
    ) -> int:
        return (await self.do(api.cancel(run, episode_ids, group_ids, reason))).cancelled

    # Closing

    async def close(self) -> None:
        """Leases that are still open are given back, those of claims under way too."""
        await asyncio.to_thread(self._polls.shutdown)
        await asyncio.to_thread(self.sync.close)
        self.let_go()

    def let_go(self) -> None:
        """Of its threads; the sync client goes on."""
        self._polls.shutdown()
        self._calls.shutdown()

    async def __aenter__(self) -> AsyncEpisodeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
