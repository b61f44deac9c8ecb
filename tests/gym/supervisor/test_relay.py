"""A server that moves, found at one address."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from palestra.gym.config.ports import listening
from palestra.gym.supervisor.relay import TcpRelay

PATIENCE_S = 30.0
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def saying(word: bytes) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(word + await reader.read())
        writer.close()

    return talk


async def asked(port: int, size: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"x" * size)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def move() -> None:
    listener = listening("127.0.0.1", 0)
    port = listener.getsockname()[1]
    relay = TcpRelay(listener)
    await relay.open()
    early = asyncio.create_task(asked(port, 3))
    await asyncio.sleep(0)
    assert not early.done()
    for word in (b"first", b"second"):
        server = await asyncio.start_server(saying(word), "127.0.0.1", 0)
        relay.point_to(server.sockets[0].getsockname())
        assert await early == word + b"xxx"
        size = 3 << 20
        assert len(await asked(port, size)) == size + len(word)
        server.close()
        await server.wait_closed()
        early = asyncio.create_task(asked(port, 3))  # nobody is there: it waits
        await asyncio.wait({early}, timeout=0.2)
        assert not early.done()
    await relay.close()
    assert await early == b""
    listener.close()


def test_callers_wait_for_a_server_and_find_it_where_it_is_now() -> None:
    asyncio.run(asyncio.wait_for(move(), PATIENCE_S))
