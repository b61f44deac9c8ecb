"""A stream stays open while there is nothing to say, and an early refusal is still an ordinary error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import httpx
import pytest
from fastapi import Request, Response
from starlette.applications import Starlette
from starlette.routing import Route

from palestra.server.core.errors import ApiError
from palestra.server.model_api.sse import KeepAlive, sse

EVERY_S = 0.05
ALIVE = KeepAlive(lambda error: f"failed: {error}\n\n".encode(), b": alive\n\n", EVERY_S)


def told(lines: Callable[[], AsyncGenerator[bytes, None]]) -> str:
    """What a client reads, or the refusal."""

    async def route(request: Request) -> Response:
        await request.body()
        try:
            return await sse(request, lines(), ALIVE)
        except ApiError as error:
            return Response(f"refused: {error}")

    async def read() -> str:
        transport = httpx.ASGITransport(Starlette(routes=[Route("/", route, methods=["POST"])]))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return (await client.post("/")).text

    return asyncio.run(read())


async def quick() -> AsyncGenerator[bytes, None]:
    yield b"a\n\n"
    yield b"b\n\n"


async def slow() -> AsyncGenerator[bytes, None]:
    for line in (b"a\n\n", b"b\n\n"):
        await asyncio.sleep(EVERY_S * 5)
        yield line


async def refused() -> AsyncGenerator[bytes, None]:
    raise ApiError(400, "no")
    yield b""


async def refused_late() -> AsyncGenerator[bytes, None]:
    await asyncio.sleep(EVERY_S * 5)
    raise ApiError(400, "no")
    yield b""


@pytest.mark.parametrize(
    ("lines", "least", "rest"),
    [
        (quick, 0, "a\n\nb\n\n"),
        (slow, 2, "a\n\nb\n\n"),
        (refused, 0, "refused: no"),
        (refused_late, 1, "failed: no\n\n"),
    ],
)
def test_a_silent_stream_is_kept_open(lines: Callable[[], AsyncGenerator[bytes, None]], least: int, rest: str) -> None:
    text = told(lines)
    assert text.replace(": alive\n\n", "") == rest
    assert text.count(": alive\n\n") >= least
    assert bool(least) == (": alive" in text)


def test_silence_between_two_events_is_filled() -> None:
    before, _, after = told(slow).partition("a\n\n")
    assert ": alive" in before
    assert ": alive" in after
