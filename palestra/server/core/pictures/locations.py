"""Files of pictures by the URLs that requests have: `data:` URLs, and what hosts have that the config names.

Owns: reading these URLs, what is not fetched. Never touches: the content of files.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Collection
from urllib.parse import unquote_to_bytes, urlsplit

import httpx

SHOWN = 60
FETCH_S = 20.0


class PictureError(ValueError):
    """A picture cannot be read. The text is for whoever sent it."""

    name = ""
    """What the picture is called in the request, where that is known."""


async def file_at(url: str, hosts: Collection[str], max_bytes: int) -> bytes:
    """The file in a data: URL, or from one of these hosts. Raises PictureError."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() == "data":
        return await asyncio.to_thread(_data, rest)
    shown = url if len(url) <= SHOWN else f"{url[:SHOWN]}…"
    if scheme.lower() in ("http", "https") and _host(url) in hosts:
        return await _fetched(url, shown, max_bytes)
    raise PictureError(
        f"a picture at {shown!r} is not fetched: this server reads pictures from data: URLs only, and from hosts that "
        "its setting picture_hosts names; send data:image/png;base64,… with the file itself"
    )


def from_base64(text: str) -> bytes:
    """Raises PictureError where it is none."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as e:
        raise PictureError(f"a picture's data is not base64 ({e})") from None


def _data(rest: str) -> bytes:
    head, comma, content = rest.partition(",")
    if not comma:
        raise PictureError("a data: URL of a picture has no comma; send data:image/png;base64,…")
    return from_base64(content) if head.lower().endswith(";base64") else unquote_to_bytes(content)


def _host(url: str) -> str:
    """Returns the host, with its port where the URL names one."""
    try:
        return urlsplit(url).netloc.rpartition("@")[2].lower()
    except ValueError:
        return ""


async def _fetched(url: str, shown: str, max_bytes: int) -> bytes:
    """Redirects are not followed: they could lead to any host."""
    found = bytearray()
    try:
        async with (
            asyncio.timeout(FETCH_S),
            httpx.AsyncClient(trust_env=False) as client,
            client.stream("GET", url) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise PictureError(f"a picture at {shown!r}: its host answered {response.status_code}")
            async for part in response.aiter_bytes():
                found += part
                if len(found) > max_bytes:
                    raise PictureError(f"a picture at {shown!r} has more than {max_bytes} bytes")
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as e:
        reason = str(e) or type(e).__name__
        raise PictureError(f"a picture at {shown!r} could not be fetched: {reason}") from None
    return bytes(found)
