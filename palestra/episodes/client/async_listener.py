"""Played groups pushed to their trainer over ZeroMQ, each committed at the server when it is acknowledged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Protocol

import msgspec

from palestra.episodes.client.errors import EpisodeClientError, ListenError
from palestra.types.episodes import PlayedGroup, PushedGroup, RunInfo

if TYPE_CHECKING:
    import zmq.asyncio

log = logging.getLogger(__name__)


class ListenedRun(Protocol):
    """The part of a run that a listener needs."""

    @property
    def name(self) -> str: ...

    async def check_cursor(self, after: int | None) -> None: ...

    async def push_to(self, address: str, instead_of: str | None = None) -> None: ...

    async def commit(self, cursor: int) -> RunInfo: ...


class PushInbox:
    """Received messages and their answers, for threads and event loops alike."""

    def __init__(self, run: str, after: int | None):
        self._run, self._after = run, after or 0
        self.acked: int | None = None
        self._open: int | None = None
        """Number of the group that waits for its acknowledgement."""

    def check_acked(self) -> None:
        if self._open is not None:
            raise ListenError(
                f"group {self._open} was not acknowledged; call ack() once it is stored, then take the next"
            )

    def take(self, payload: bytes) -> PlayedGroup | str:
        """The group in a message if it is new; otherwise the answer to send."""
        try:
            group = msgspec.json.decode(payload, type=PushedGroup)
        except msgspec.DecodeError as error:
            return f"refused: this is not a group: {error}"
        if group.run != self._run:
            return f"refused: this is the trainer of run {self._run}"
        if group.group.number <= self._after:
            return f"ack {group.group.number}"  # the last answer was lost on its way
        self._open = group.group.number
        return group.group

    def ack(self, number: int) -> str | None:
        """The answer to send; None if the server no longer waits for it."""
        if self._open != number:
            return None
        self._open, self._after, self.acked = None, number, number
        return f"ack {number}"


class ListenSocket:
    """The ZeroMQ socket on which groups arrive."""

    def __init__(self, address: str):
        try:
            import zmq
            import zmq.asyncio
        except ImportError:
            raise ListenError(
                "listening needs pyzmq: pip install pyzmq, or read the groups with Run.groups()"
            ) from None
        self._context = zmq.asyncio.Context()
        self.socket: zmq.asyncio.Socket = self._context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 1000)  # the last answer may be on its way
        self.socket.setsockopt(zmq.IPV6, int("[" in address))
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self._end()
            raise ListenError(f"{address} cannot be listened on: {error}") from None
        self.address: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def close(self) -> None:
        """Closes the socket; waits up to a second while the last answer is on its way."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self.socket.close()
        self._context.term()


class AsyncPushed:
    """A received group. Store it, then call `ack`; otherwise it is sent again."""

    def __init__(self, group: PlayedGroup, listener: AsyncListener):
        self.group, self._listener = group, listener

    @property
    def number(self) -> int:
        return self.group.number

    async def ack(self) -> None:
        """Confirms that the group is stored, so that the server may delete it."""
        await self._listener.ack(self.number)


class AsyncListener:
    """Receives pushed groups; made by `AsyncRun.listen`, for one task. Cancelling it never acknowledges a group."""

    def __init__(
        self, run: ListenedRun, address: str, *, after: int | None, wait_s: float | None, advertised: str | None
    ):
        self._run, self.address, self._after, self._advertised = run, address, after, advertised
        self._wait_ms = -1 if wait_s is None else round(wait_s * 1000)
        self._inbox = PushInbox(run.name, after)
        self._listen_socket: ListenSocket | None = None

    async def __aenter__(self) -> AsyncListener:
        await self._run.check_cursor(self._after)
        self._listen_socket = ListenSocket(self.address)
        self.address = self._listen_socket.address
        try:
            self._advertised = self._advertised or self.address
            await self._run.push_to(self._advertised)
        except BaseException:
            await self._listen_socket.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open_socket.close()
        try:
            if self._inbox.acked is not None:
                await self._run.commit(self._inbox.acked)  # the last answer may be lost with the socket
            await self._run.push_to("", self._advertised)
        except EpisodeClientError as error:
            log.warning("the server could not be informed that this trainer stops listening: %s", error)

    async def __aiter__(self) -> AsyncGenerator[AsyncPushed, None]:
        while (payload := await self._receive()) is not None:
            taken = self._inbox.take(payload)
            if isinstance(taken, str):
                await self._open_socket.socket.send_string(taken)
            else:
                yield AsyncPushed(taken, self)

    async def ack(self, number: int) -> None:
        if (answer := self._inbox.ack(number)) is not None:
            await self._open_socket.socket.send_string(answer)

    async def _receive(self) -> bytes | None:
        """The next message; None if none came in time."""
        self._inbox.check_acked()
        socket = self._open_socket.socket
        return await socket.recv() if await socket.poll(self._wait_ms) else None

    @property
    def _open_socket(self) -> ListenSocket:
        if self._listen_socket is None:
            raise ListenError("the listener is not open; use `with` or `async with run.listen(…) as groups`")
        return self._listen_socket
