"""Server-sent events: a stream whose beginning can still be refused, and whose end frees what it used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from palestra.server.http.connection import while_connected
from palestra.server.model_api.json_text import dumps
from palestra.util.json_types import JsonPayload

DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # a proxy must not buffer events

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def event(data: JsonPayload, name: str | None = None) -> bytes:
    """Returns one event as it is written; `name` for APIs that name their events."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + dumps(data) + b"\n\n"


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """How a stream stays open while there is nothing to say, as when a long prompt is computed."""

    failed: Callable[[Exception], bytes]
    """Writes a refusal that comes when the stream was begun for the sake of keeping it open."""
    line: bytes = b": keep-alive\n\n"
    """A comment, which every client skips, or an event of the API that means nothing."""
    every_s: float = 10.0  # proxies and clients wait for at least 30


class EventStream(StreamingResponse):
    def __init__(self, events: AsyncGenerator[bytes, None], keep_alive: KeepAlive):
        super().__init__(events, media_type="text/event-stream", headers=HEADERS)
        self._events, self._keep_alive, self._sent_at = events, keep_alive, 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()  # if the client has left, sampling for it stops

    async def stream_response(self, send: Send) -> None:
        async def noted(message: MutableMapping[str, Any]) -> None:
            self._sent_at = asyncio.get_running_loop().time()
            await send(message)

        ticking = asyncio.create_task(self._tick(noted), name="keep-alive")
        try:
            await super().stream_response(noted)
        finally:
            ticking.cancel()

    async def _tick(self, send: Send) -> None:
        clock, every_s = asyncio.get_running_loop().time, self._keep_alive.every_s
        while True:
            await asyncio.sleep(max(self._sent_at + every_s - clock(), every_s / 10))
            if self._sent_at and clock() - self._sent_at >= every_s:
                with suppress(OSError):  # the client has left; the stream itself notices it
                    await send({"type": "http.response.body", "body": self._keep_alive.line, "more_body": True})


async def sse(request: Request, lines: AsyncGenerator[bytes, None], keep_alive: KeepAlive) -> EventStream:
    """An exception of `lines` before its first item is raised here, as an ordinary error, unless it takes long."""
    first = asyncio.create_task(_first(lines), name="first event")
    try:
        await while_connected(request, _waited(first, keep_alive.every_s))
        if first.done():
            first.result()
    except BaseException:
        await _end(first, lines)
        raise
    return EventStream(_whole(first, lines, keep_alive), keep_alive)


async def _first(lines: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(lines)


async def _waited(task: asyncio.Task[bytes], timeout_s: float) -> None:
    await asyncio.wait({task}, timeout=timeout_s)


async def _whole(
    first: asyncio.Task[bytes], lines: AsyncGenerator[bytes, None], keep_alive: KeepAlive
) -> AsyncGenerator[bytes, None]:
    try:
        if not first.done():
            yield keep_alive.line
        try:
            yield await first
        except Exception as error:
            yield keep_alive.failed(error)
            return
        async for line in lines:
            yield line
    finally:
        await _end(first, lines)


async def _end(first: asyncio.Task[bytes], lines: AsyncGenerator[bytes, None]) -> None:
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await lines.aclose()
