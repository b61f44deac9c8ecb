"""The proxy to the model endpoint: connections of the sandbox's own network, carried to one address outside.

Who made the listening socket, and how a sandbox gets to it, is the backend's.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Self

from palestra.sandbox.spec import EndpointProxy

CHUNK = 64 * 1024
MAX_CONNECTIONS = 64
CONNECT_S = 10.0


class EndpointRelay:
    """Open from `open` until `close`."""

    def __init__(self, proxy: EndpointProxy) -> None:
        self._address = proxy.address
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self, listening: socket.socket) -> Self:
        listening.setblocking(False)
        self._server = await asyncio.start_server(self._accepted, sock=listening, limit=CHUNK)
        return self

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) <= MAX_CONNECTIONS:
                await self._carry(reader, writer)
        except* OSError:  # either side is gone, or took too long: the other sees its connection end
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(CONNECT_S):
            there, back = await asyncio.open_connection(*self._address, limit=CHUNK)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, back), name="endpoint proxy out")
                both.create_task(_copy(there, writer), name="endpoint proxy in")
        finally:
            back.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(CHUNK):
        target.write(data)
        await target.drain()
    target.write_eof()
