"""Request bodies that are read by hand: bounded, unpacked."""

from __future__ import annotations

from fastapi import Request

from palestra.server.tinker.decode import decompress


async def read_body(request: Request) -> bytes:
    """The middleware bounds what is read; unpacking has the same bound."""
    limit: int = request.app.state.max_body_bytes
    return decompress(await request.body(), request.headers.get("content-encoding"), limit)
