"""Reads request bodies that FastAPI's schemas do not read: limited, unpacked."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import TypeVar

import zstandard
from fastapi import Request

from palestra.server.core.wire_errors import TooLarge, WireError, shown

T = TypeVar("T")

GZIP = 31  # zlib's window bits for a gzip header
LARGE_BYTES = 1 << 20  # takes about 3 ms to decode


async def read_body(request: Request) -> bytes:
    """Reads a body. The middleware limits what is read; unpacking has the same limit."""
    return decompress(await request.body(), request.headers.get("content-encoding"), request.app.state.max_body_bytes)


async def decoded(decode: Callable[[bytes], T], body: bytes) -> T:
    """Decodes a large body in a thread, so that other requests get their turn."""
    return await asyncio.to_thread(decode, body) if len(body) > LARGE_BYTES else decode(body)


def decompress(body: bytes, encoding: str | None, max_bytes: int) -> bytes:
    """Unpacks a body by its Content-Encoding: zstd, gzip or none. Raises TooLarge beyond `max_bytes`."""
    coding = (encoding or "").strip().lower()
    if coding in ("", "identity"):
        plain = body
    elif coding == "zstd":
        plain = _unzstd(body, max_bytes)
    elif coding == "gzip":
        plain = _gunzip(body, max_bytes)
    else:
        raise WireError(f"Content-Encoding {shown(encoding)} is not supported; send zstd, gzip or none")
    if len(plain) > max_bytes:
        raise _too_large(max_bytes)
    return plain


def _unzstd(body: bytes, max_bytes: int) -> bytes:
    try:
        if zstandard.frame_content_size(body) > max_bytes:
            raise _too_large(max_bytes)
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=max_bytes, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise WireError(f"the body is not one zstd frame of at most {max_bytes} bytes: {e}") from None


def _gunzip(body: bytes, max_bytes: int) -> bytes:
    stream = zlib.decompressobj(GZIP)
    try:
        plain = stream.decompress(body, max_bytes + 1)
    except zlib.error as e:
        raise WireError(f"the body is not gzip: {e}") from None
    if len(plain) > max_bytes:
        raise _too_large(max_bytes)
    if not stream.eof or stream.unused_data:
        raise WireError("the body is not one whole gzip member")
    return plain


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body is larger than {max_bytes} bytes; send the data in several requests")
