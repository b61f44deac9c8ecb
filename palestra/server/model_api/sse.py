"""Server-sent events: a stream whose beginning can still be refused, and whose end frees what it used."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from palestra.server.http.connection import while_connected
from palestra.server.model_api.json_text import dumps
from palestra.util.json_types import JsonObject

DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # a proxy must not buffer events

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def event(data: JsonObject, name: str | None = None) -> bytes:
    """Returns one event as it is written; `name` for APIs that name their events."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + dumps(data) + b"\n\n"


class EventStream(StreamingResponse):
    def __init__(self, events: AsyncGenerator[bytes, None]):
        super().__init__(events, media_type="text/event-stream", headers=HEADERS)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()  # if the client has left, sampling for it stops


async def sse(request: Request, lines: AsyncGenerator[bytes, None]) -> EventStream:
    """An exception of `lines` before its first item is raised here, as an ordinary error."""
    try:
        first = await while_connected(request, _first(lines))
    except BaseException:
        await lines.aclose()
        raise
    return EventStream(_whole(first, lines))


async def _first(lines: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(lines)


async def _whole(first: bytes, lines: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(lines):
        yield first
        async for line in lines:
            yield line
