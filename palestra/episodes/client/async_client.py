"""The client of the episode API for coroutines: claim, play, end; and the trainer's side."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import SupportsFloat, TypeVar, Unpack

from palestra.episodes.client import api
from palestra.episodes.client.async_episode import AsyncEpisode, OnError
from palestra.episodes.client.async_run import AsyncRun
from palestra.episodes.client.claiming import EpisodeClaims
from palestra.episodes.client.errors import NoEpisode
from palestra.episodes.client.leases import ClientLeases
from palestra.episodes.client.results import as_result
from palestra.episodes.client.retries import RETRY_S, RetryingCalls
from palestra.types.episode_wire import EpisodePage
from palestra.types.episodes import (
    EndAnswer,
    EpisodeInfo,
    EpisodeKind,
    EpisodeResult,
    EpisodeState,
    RunInfo,
    RunSettings,
)
from palestra.types.timelines import EpisodeTimeline

log = logging.getLogger(__name__)
T = TypeVar("T")


class AsyncEpisodeClient:
    """Client of a server's episodes, for coroutines of any event loop. `key`: API key (None: TINKER_API_KEY).
    `retry_s`: how long to retry while the server does not answer."""

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
        self.calls = RetryingCalls(url, key, retry_s, tls=tls, proxy=proxy)
        self.leases = ClientLeases(self.calls, client_id)
        self.claims = EpisodeClaims(self.calls, self.leases)

    @property
    def url(self) -> str:
        return self.calls.url

    @property
    def client_id(self) -> str:
        return self.leases.client_id

    async def do(self, call: api.ApiCall[T], *, retry_s: float | None = None) -> T:
        return await self.calls.do(call, retry_s=retry_s)

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
        """Claims one episode to play, waiting at most `wait_s`. If the block raises, the episode ends as failed or is
        released, by `on_error`; if it is left without `end`, or its task is cancelled, the episode is released."""
        on_error = OnError(on_error)
        episode = await self.claim_one(run, kind, wait_s=wait_s, lease_s=lease_s)
        try:
            yield episode
        except BaseException as error:
            await episode.leave(error, on_error)
            raise
        else:
            await episode.leave()

    async def claim_one(
        self,
        run: str | None = None,
        kind: EpisodeKind | str | None = None,
        *,
        wait_s: float | None = None,
        lease_s: float | None = None,
    ) -> AsyncEpisode:
        found = await self.claim(1, run=run, kind=kind, wait_s=wait_s, lease_s=lease_s)
        if not found:
            raise NoEpisode(f"no episode within {wait_s:g} s" + (f" in run {run!r}" if run else ""))
        return found[0]

    async def claim(
        self,
        max_n: int = 1,
        *,
        run: str | None = None,
        kind: EpisodeKind | str | None = None,
        wait_s: float | None = None,
        lease_s: float | None = None,
    ) -> list[AsyncEpisode]:
        """Claims one to `max_n` episodes as soon as there are any; empty if there was none for `wait_s`. Heartbeats
        keep the leases until the caller ends or releases them. If this is cancelled, episodes that the running request
        still brings are given back."""
        known = None if kind is None else EpisodeKind(kind)
        leases = await self.claims.claim(max_n, run=run, kind=known, wait_s=wait_s, lease_s=lease_s)
        return [AsyncEpisode(lease, self.leases) for lease in leases]

    async def end_many(self, ends: Iterable[tuple[AsyncEpisode, EpisodeResult | SupportsFloat]]) -> list[EndAnswer]:
        """Ends many episodes in few requests; a refused result is returned in its place, not raised."""
        return await self.leases.end_many([(episode.held_lease, as_result(result)) for episode, result in ends])

    # Training and queries

    async def run(self, name: str, settings: RunSettings | None = None, *, model: str | None = None) -> AsyncRun:
        """Makes a run, or changes the given settings of an existing one."""
        return AsyncRun(self.calls, await self.do(api.put_run(name, settings, model)))

    async def runs(self) -> list[RunInfo]:
        return (await self.do(api.get_runs())).runs

    async def run_info(self, name: str) -> RunInfo:
        return await self.do(api.get_run(name))

    async def delete_run(self, name: str) -> int:
        """Deletes a run with all its episodes; returns their number."""
        return (await self.do(api.delete_run(name))).deleted

    async def episodes(
        self,
        run: str | None = None,
        state: EpisodeState | str | None = None,
        *,
        limit: int = 100,
        offset: int = 0,
        **which: Unpack[api.EpisodeFilter],
    ) -> EpisodePage:
        """Episodes that are not committed, in the order of registration; `which` selects by reward, error or task."""
        return await self.do(api.list_episodes(run, state, limit=limit, offset=offset, **which))

    async def episode_info(self, episode_id: str) -> EpisodeInfo:
        return await self.do(api.get_episode(episode_id))

    async def timeline(self, episode_id: str) -> EpisodeTimeline:
        """The timeline of an episode: the model calls and tools of its attempts. Secrets are blacked out."""
        return await self.do(api.get_timeline(episode_id))

    def export(
        self,
        run: str | None = None,
        state: EpisodeState | str | None = None,
        *,
        limit: int | None = None,
        **which: Unpack[api.EpisodeFilter],
    ) -> AsyncGenerator[EpisodeTimeline, None]:
        """Timelines of the episodes that `episodes` lists, without its limit, as they arrive."""
        return self.calls.lines(api.export_episodes(run, state, limit, which))

    async def requeue(self, episode_ids: Sequence[str]) -> int:
        """Puts parked episodes back into the queue."""
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
        """Closes the client and gives back all open leases, including those of cancelled claims."""
        await self.claims.end()
        await self.leases.close()
        await self.calls.close()

    async def __aenter__(self) -> AsyncEpisodeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
