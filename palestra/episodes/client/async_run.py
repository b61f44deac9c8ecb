"""A run for its trainer: registering groups, reading played ones, publishing weights."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Unpack

from msgspec.structs import replace

from palestra.episodes.client import api
from palestra.episodes.client.async_listener import AsyncListener
from palestra.episodes.client.errors import ListenError
from palestra.episodes.client.retries import RetryingCalls
from palestra.types.episode_wire import EpisodePage, PlayedGroups
from palestra.types.episodes import EpisodeState, NewGroup, PlayedGroup, Registered, RunInfo

POLL_S = 20.0
AT_ONCE = 16
"""Maximum number of groups in one answer."""


class ReadPace:
    """Where a reader of played groups is, and how long it waits for the next."""

    def __init__(self, after: int, wait_s: float | None):
        self.cursor, self._wait_s = after, wait_s
        self._since = time.monotonic()

    def next_wait(self) -> float:
        if self._wait_s is None:
            return POLL_S
        return min(max(self._since + self._wait_s - time.monotonic(), 0.0), POLL_S)

    def goes_on(self, page: PlayedGroups) -> bool:
        """Whether to continue; false if nothing came for `wait_s`."""
        now = time.monotonic()
        if page.groups or page.cursor > self.cursor:
            self.cursor, self._since = max(page.cursor, self.cursor), now
            return True
        return self._wait_s is None or now < self._since + self._wait_s


class AsyncRun:
    """A run, made by `AsyncEpisodeClient.run`. Every call may be repeated without harm."""

    def __init__(self, calls: RetryingCalls, info: RunInfo):
        self._calls, self.info = calls, info
        """State of the run at the last call."""

    @property
    def name(self) -> str:
        return self.info.run

    async def refresh(self) -> RunInfo:
        return await self._note(api.get_run(self.name))

    async def register(self, groups: Iterable[NewGroup]) -> list[Registered]:
        """Registers groups, waiting while the queue is full. Groups that are already registered do not change."""
        registered: list[Registered] = []
        for batch in api.batches(list(groups)):
            registered += (await self._calls.do(api.register(self.name, batch))).groups
        return registered

    async def groups(
        self,
        after: int | None = None,
        *,
        wait_s: float | None = None,
        version: int | None = None,
        tokens: bool = True,
    ) -> AsyncGenerator[PlayedGroup, None]:
        """Complete and dropped groups in the order of delivery, after the cursor `after` (None: the committed one).
        Ends when none came for `wait_s`. A group's `number` is the cursor to commit. `version`: version of the weights
        to train; groups that are older than the run allows are dropped."""
        pace = ReadPace(self.info.committed if after is None else after, wait_s)
        while True:
            call = api.played_groups(
                self.name, pace.cursor, limit=AT_ONCE, wait_s=pace.next_wait(), version=version, tokens=tokens
            )
            page = await self._calls.do(call)
            for group in page.groups:
                yield group
            if not pace.goes_on(page):
                return

    def listen(
        self, address: str, *, after: int | None = None, wait_s: float | None = None, told: str | None = None
    ) -> AsyncListener:
        """The same pushed to `address` over ZeroMQ, each committed by its acknowledgement:

            async with run.listen("tcp://127.0.0.1:5555") as groups:
                async for pushed in groups:
                    save(pushed.group)
                    await pushed.ack()

        Groups up to `after`, the last one that is safe here, are acknowledged unseen (None: none are). Ends when none
        came for `wait_s`. `told`: how the server reaches it, where that is another address."""
        return AsyncListener(self, address, after=after, wait_s=wait_s, advertised=told)

    async def check_cursor(self, after: int | None) -> None:
        """Checks that a cursor can belong to this run."""
        if after and after > (info := await self.refresh()).delivered:
            detail = f"after={after}: the newest group of run {info.run!r} is {info.delivered}"
            raise ListenError(f"{detail}; is it the cursor of another run, or of another server?")

    async def push_to(self, address: str, instead_of: str | None = None) -> None:
        """Sets the address to which the server pushes groups (empty: none), unless it was changed meanwhile."""
        settings = (await self.refresh()).settings
        if instead_of in (None, settings.push_to):
            await self._note(api.put_run(self.name, replace(settings, push_to=address), None))

    async def commit(self, cursor: int) -> RunInfo:
        """Commits groups up to the cursor: the server deletes them. Call it once a checkpoint has the cursor."""
        return await self._note(api.commit(self.name, cursor))

    async def publish(self, version: int, model: str) -> RunInfo:
        """Publishes newer weights, which answer the model calls of this run's episodes from now on."""
        return await self._note(api.publish(self.name, version, model))

    async def pause(self) -> RunInfo:
        """Pauses the run: claims get nothing, model calls wait, and leases do not expire."""
        return await self._note(api.pause(self.name))

    async def resume(self) -> RunInfo:
        return await self._note(api.resume(self.name))

    async def cancel(
        self,
        *,
        episode_ids: Sequence[str] | None = None,
        group_ids: Sequence[str] | None = None,
        reason: str = "cancelled",
    ) -> int:
        return (await self._calls.do(api.cancel(self.name, episode_ids, group_ids, reason))).cancelled

    async def delete(self) -> int:
        """Deletes the run with all its episodes, read or not; returns their number. Players get `cancelled`, and the
        name can be used again."""
        return (await self._calls.do(api.delete_run(self.name))).deleted

    async def requeue(self, episode_ids: Sequence[str]) -> int:
        return (await self._calls.do(api.requeue(episode_ids))).requeued

    async def episodes(
        self,
        state: EpisodeState | str | None = None,
        *,
        limit: int = 100,
        offset: int = 0,
        **which: Unpack[api.EpisodeFilter],
    ) -> EpisodePage:
        return await self._calls.do(api.list_episodes(self.name, state, limit=limit, offset=offset, **which))

    async def picture(self, digest: str) -> bytes:
        """The PNG file of a picture that a trajectory names in its `images`."""
        return (await self._calls.do(api.get_picture(digest))).data

    async def _note(self, call: api.ApiCall[RunInfo]) -> RunInfo:
        self.info = await self._calls.do(call)
        return self.info
