"""Request bodies that are read by hand: bounded, unpacked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from palestra.server.tinker.decode import decompress

T = TypeVar("T")

LARGE_BYTES = 1 << 20  # some 3 ms to decode


async def read_body(request: Request) -> bytes:
    """The middleware bounds what is read; unpacking has the same bound."""
    body = await _whole(request)
    coding = next((value for name, value in request.scope["headers"] if name == b"content-encoding"), None)
    if coding is None:
        return body
    return decompress(body, coding.decode("latin-1"), request.app.state.max_body_bytes)


async def _whole(request: Request) -> bytes:
    """As `request.body()`, which makes a generator and a context for what is one message nearly always."""
    parts: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def decoded(decode: Callable[[bytes], T], body: bytes) -> T:
    """A large body is taken apart beside the loop, so that others' requests get their turns."""
    return await asyncio.to_thread(decode, body) if len(body) > LARGE_BYTES else decode(body)
