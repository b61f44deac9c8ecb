"""The same for event loops: played groups pushed to a trainer that is a coroutine.

Owns: as `listening`, with `await`. Never touches: the trainer's checkpoint, HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from palestra.episodes.client.errors import EpisodeClientError
from palestra.episodes.client.listening import NOT_TOLD, Ear, Inbox, ListenError, log
from palestra.types.episodes import PlayedGroup


class AsyncPushed:
    """As `Pushed`."""

    def __init__(self, group: PlayedGroup, ack: Callable[[], Awaitable[None]]):
        self.group, self._ack = group, ack

    @property
    def number(self) -> int:
        return self.group.number

    async def ack(self) -> None:
        """It is safe here: the server may forget it."""
        await self._ack()


class AsyncListener:
    """`AsyncRun.listen` makes it. For one task; cancelled, it leaves no group acknowledged that was not."""

    def __init__(
        self,
        check: Callable[[], Awaitable[None]],
        push_to: Callable[[str, str | None], Awaitable[None]],
        commit: Callable[[int], Awaitable[object]],
        run: str,
        address: str,
        *,
        after: int | None,
        wait_s: float | None,
        told: str | None,
    ):
        """`check`: before anything is bound. `push_to`: as of `Listener`."""
        self._check, self._push_to, self._commit = check, push_to, commit
        self.address, self._told = address, told
        self._wait_ms = None if wait_s is None else wait_s * 1000
        self._inbox = Inbox(run, after)
        self._ear: Ear | None = None

    async def __aenter__(self) -> AsyncListener:
        await self._check()
        self._ear = Ear(self.address, is_async=True)
        self.address = self._ear.address
        try:
            self._told = self._told or self.address
            await self._push_to(self._told, None)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()
        try:
            if self._inbox.acked is not None:
                await self._commit(self._inbox.acked)  # the last answer may be lost with the socket
            await self._push_to("", self._told)
        except EpisodeClientError as error:
            log.warning(NOT_TOLD, error)

    async def __aiter__(self) -> AsyncIterator[AsyncPushed]:
        while (payload := await self._receive()) is not None:
            taken = self._inbox.take(payload)
            if isinstance(taken, str):
                await self._open_ear.socket.send_string(taken)
            else:
                yield self._pushed(taken)

    def _pushed(self, group: PlayedGroup) -> AsyncPushed:
        async def ack() -> None:
            if (answer := self._inbox.ack(group.number)) is not None:
                await self._open_ear.socket.send_string(answer)

        return AsyncPushed(group, ack)

    async def _receive(self) -> bytes | None:
        """None: nothing came for so long."""
        self._inbox.check_acked()
        socket = self._open_ear.socket
        return await socket.recv() if await socket.poll(self._wait_ms) else None

    async def _close(self) -> None:
        await asyncio.to_thread(self._open_ear.close)

    @property
    def _open_ear(self) -> Ear:
        if self._ear is None:
            raise ListenError("nobody listens yet: async with run.listen(…) as groups")
        return self._ear
