"""CPU that a client spends on one call, with many calls in flight: httpx, our HTTP client, beside aiohttp.

It says why aiohttp stays in `palestra/server/vllm/client.py` and `palestra/gym/http_client.py`, which have hundreds of
calls in flight.

    python benchmarks/http_clients.py --calls 16 256 1024
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import aiohttp
import httpx
import uvicorn

ANSWER = b'{"choices": [{"text": "' + b"x" * 4000 + b'"}]}'
BODY = b'{"prompt": [1, 2, 3]}'
ANSWER_AFTER_S = 0.2
CALLS_IN_ALL = 1024

Message = MutableMapping[str, Any]


async def answer_later(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    await receive()
    await asyncio.sleep(ANSWER_AFTER_S)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(ANSWER))]})
    await send({"type": "http.response.body", "body": ANSWER})


def serve(port: int) -> None:
    uvicorn.run(answer_later, port=port, log_level="error", backlog=4096, lifespan="off")


def rounds(calls: int) -> int:
    return max(3, CALLS_IN_ALL // calls)


async def with_httpx(url: str, calls: int) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=300, verify=False) as client:

        async def one() -> None:
            assert (await client.post(url, content=BODY)).content == ANSWER

        for _ in range(rounds(calls)):
            await asyncio.gather(*(one() for _ in range(calls)))


async def with_aiohttp(url: str, calls: int) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> None:
            async with session.post(url, data=BODY) as response:
                assert await response.read() == ANSWER

        for _ in range(rounds(calls)):
            await asyncio.gather(*(one() for _ in range(calls)))


def cpu_ms(work: Callable[[str, int], Awaitable[None]], url: str, calls: int) -> float:
    async def run() -> None:
        await work(url, calls)

    began = time.process_time()
    asyncio.run(run())
    return (time.process_time() - began) / (calls * rounds(calls)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, nargs="+", default=[16, 64, 256, 1024], help="in flight at once")
    calls_in_flight = parser.parse_args().calls
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = multiprocessing.Process(target=serve, args=(port,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{port}/"
    while True:
        try:
            httpx.get(url)
            break
        except httpx.TransportError:
            time.sleep(0.1)
    print(f"{'calls in flight':>16} {'httpx ms':>10} {'aiohttp ms':>11} {'ratio':>6}")
    for calls in calls_in_flight:
        ours, other = cpu_ms(with_httpx, url, calls), cpu_ms(with_aiohttp, url, calls)
        print(f"{calls:>16} {ours:>10.3f} {other:>11.3f} {ours / other:>6.1f}")
    server.terminate()


if __name__ == "__main__":
    main()
