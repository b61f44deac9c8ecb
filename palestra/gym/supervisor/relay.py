"""One address for a server that moves: connections are forwarded to where the server is now.

While the server runs nowhere, callers wait, as for a slow server.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from palestra.gym.config.ports import BACKLOG

WAIT_S = 60.0  # for a server that is being restarted
RETRY_S = 0.1
PART_BYTES = 1 << 18


class TcpRelay:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._target: tuple[str, int] | None = None
        self._has_target = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._listener.dup(), backlog=BACKLOG)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def point_to(self, target: tuple[str, int] | None) -> None:
        self._target = target
        if target is None:
            self._has_target.clear()
        else:
            self._has_target.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        far: asyncio.StreamWriter | None = None
        try:
            far_reader, far = await self._connected()
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(_pump(reader, far))
                pumps.create_task(_pump(far_reader, writer))
        except (OSError, TimeoutError, ExceptionGroup, asyncio.CancelledError):
            pass  # the caller sees a connection that ends, and may try again; only `close` cancels
        finally:
            self._connections.discard(task)
            for one in (writer, far):
                if one is not None:
                    one.close()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects to the server. If the connection is refused, the server is about to move."""
        async with asyncio.timeout(WAIT_S):
            while True:
                await self._has_target.wait()
                assert self._target is not None
                with suppress(OSError):
                    return await asyncio.open_connection(*self._target)
                await asyncio.sleep(RETRY_S)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(PART_BYTES):
        writer.write(part)
        await writer.drain()
    with suppress(OSError):
        writer.write_eof()
