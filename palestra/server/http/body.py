"""Request bodies that no schema of FastAPI reads: bounded, unpacked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from palestra.server.tinker.decode import decompress

T = TypeVar("T")

LARGE_BYTES = 1 << 20  # some 3 ms to decode


async def read_body(request: Request) -> bytes:
    """The middleware bounds what is read; unpacking has the same bound."""
    return decompress(await request.body(), request.headers.get("content-encoding"), request.app.state.max_body_bytes)


async def decoded(decode: Callable[[bytes], T], body: bytes) -> T:
    """A large body is taken apart beside the loop, so that others' requests get their turns."""
    return await asyncio.to_thread(decode, body) if len(body) > LARGE_BYTES else decode(body)
