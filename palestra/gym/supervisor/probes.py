"""Is it there, and is it who it should be: one small GET, with a time limit.

Owns: asking over a socket. Never touches: what follows from the answer.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from urllib.parse import urlsplit

NAME_HEADER = "x-gym-server"
MAX_HEADER_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Heard:
    status: int
    headers: dict[str, str] = field(default_factory=dict)


class NoAnswer(Exception):
    """The words say why."""


async def get(url: str, timeout_s: float) -> Heard:
    """Status and headers of what answers there. Raises NoAnswer."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                parts.hostname, parts.port or (443 if is_tls else 80), ssl=_any_certificate() if is_tls else None
            )
            try:
                host = parts.netloc.rpartition("@")[2]
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("latin-1"))
                await writer.drain()
                return _heard(await reader.readuntil(b"\r\n\r\n"))
            finally:
                writer.close()
    except TimeoutError:
        raise NoAnswer(f"no answer in {timeout_s:g} s") from None
    except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise NoAnswer(str(error) or type(error).__name__) from None


def _heard(head: bytes) -> Heard:
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if not words[0].startswith("HTTP/") or len(words) < 2:
        raise NoAnswer(f"what answers is no HTTP server: {first[:80]!r}")
    headers = (line.partition(":") for line in lines if line)
    return Heard(int(words[1]), {name.strip().lower(): value.strip() for name, _, value in headers})


def _any_certificate() -> ssl.SSLContext:
    """Nothing is said but GET: whoever answers, there is somebody."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def check_server(name: str, host: str, port: int, timeout_s: float) -> None:
    """Returns where the server of that name is healthy. Raises NoAnswer."""
    heard = await get(f"http://{reachable(host)}:{port}/", timeout_s)
    if heard.status != 200:
        raise NoAnswer(f"answers with status {heard.status}")
    said = heard.headers.get(NAME_HEADER, name)
    if said != name:
        raise NoAnswer(f"the server {said!r} answers there")


def reachable(host: str) -> str:
    """Every address is also this one; a literal of IPv6 gets its brackets."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1" if host != "::" else "[::1]"
    return f"[{host}]" if ":" in host else host
