"""A run from the side of a trainer that is a coroutine.

Owns: as `run`, with `await`. Never touches: the trainer's checkpoint.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol, TypeVar, Unpack

from msgspec.structs import replace

from palestra.episodes.client import api
from palestra.episodes.client.async_listening import AsyncListener
from palestra.episodes.client.run import AT_ONCE, ReadPace, check_cursor
from palestra.types.episodes import EpisodeState, NewGroup, PlayedGroup, Registered, RunInfo

T = TypeVar("T")

POLL_S = 5.0  # as of claims: a thread that waits cannot be interrupted


class Do(Protocol):
    async def __call__(self, call: api.Call[T], *, waits: bool = False) -> T: ...


class AsyncRun:
    """`AsyncEpisodeClient.run` makes it. The methods are explained at `Run`."""

    def __init__(self, do: Do, info: RunInfo):
        self._do, self.info = do, info

    @property
    def name(self) -> str:
        return self.info.run

    async def refresh(self) -> RunInfo:
        return await self._note(api.get_run(self.name))

    async def register(self, groups: Iterable[NewGroup]) -> list[Registered]:
        told: list[Registered] = []
        for batch in api.batches(list(groups)):
            told += (await self._do(api.register(self.name, batch))).groups
        return told

    async def groups(
        self,
        after: int | None = None,
        *,
        wait_s: float | None = None,
        version: int | None = None,
        tokens: bool = True,
    ) -> AsyncIterator[PlayedGroup]:
        pace = ReadPace(self.info.committed if after is None else after, wait_s, POLL_S)
        while True:
            call = api.played_groups(
                self.name, pace.cursor, limit=AT_ONCE, wait_s=pace.next_wait(), version=version, tokens=tokens
            )
            told = await self._do(call, waits=True)
            for group in told.groups:
                yield group
            if not pace.goes_on(told):
                return

    def listen(
        self, address: str, *, after: int | None = None, wait_s: float | None = None, told: str | None = None
    ) -> AsyncListener:
        """As `Run.listen`:

        async with run.listen("tcp://127.0.0.1:5555") as groups:
            async for pushed in groups:
                save(pushed.group)
                await pushed.ack()
        """

        async def check() -> None:
            if after:
                check_cursor(after, await self.refresh())

        return AsyncListener(
            check, self._push_to, self.commit, self.name, address, after=after, wait_s=wait_s, told=told
        )

    async def commit(self, cursor: int) -> RunInfo:
        return await self._note(api.commit(self.name, cursor))

    async def publish(self, version: int, model: str) -> RunInfo:
        return await self._note(api.publish(self.name, version, model))

    async def pause(self) -> RunInfo:
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
        return (await self._do(api.cancel(self.name, episode_ids, group_ids, reason))).cancelled

    async def delete(self) -> int:
        return (await self._do(api.delete_run(self.name))).deleted

    async def requeue(self, episode_ids: Sequence[str]) -> int:
        return (await self._do(api.requeue(episode_ids))).requeued

    async def episodes(
        self,
        state: EpisodeState | str | None = None,
        *,
        limit: int = 100,
        offset: int = 0,
        **which: Unpack[api.Which],
    ) -> api.EpisodeList:
        return await self._do(api.list_episodes(self.name, state, limit=limit, offset=offset, **which))

    async def _push_to(self, address: str, instead_of: str | None) -> None:
        settings = (await self.refresh()).settings
        if instead_of in (None, settings.push_to):
            await self._note(api.put_run(self.name, replace(settings, push_to=address), None))

    async def _note(self, call: api.Call[RunInfo]) -> RunInfo:
        self.info = await self._do(call)
        return self.info
