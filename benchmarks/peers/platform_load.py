"""Load on an MCP server or a platform: kept connections, requests that are bytes already.

The client costs as little as it can, since it shares the cores with what it measures.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import psutil

MODERN = "2026-07-28"
META = "io.modelcontextprotocol"
AUTH = "Authorization: Bearer benchmark\r\n"


@dataclass(slots=True)
class Taken:
    latencies_ms: list[float] = field(default_factory=list)
    took_s: float = 0.0
    server_cpu_ms: float = 0.0
    """Per request."""

    @property
    def per_second(self) -> float:
        return len(self.latencies_ms) / self.took_s


class Target(Protocol):
    """What is under load."""

    @property
    def url(self) -> str: ...

    def cpu_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    process: psutil.Process

    def cpu_s(self) -> float:
        spent = self.process.cpu_times()
        return spent.user + spent.system


@contextmanager
def served(command: list[str], ready: str = "http") -> Iterator[Served]:
    """Until the block ends. The first word of its output that begins with `ready` is the address."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = next(word for line in process.stdout for word in line.split() if word.startswith(ready))
            yield Served(url.rstrip(";"), psutil.Process(process.pid))
        finally:
            process.terminate()


def platform_command(state: Path) -> list[str]:
    where = [str(Path(sys.executable).with_name("palestra")), "platform", "serve"]
    return [*where, "--port", "0", "--state", str(state), "--max-instances", "200000", "--max-per-team", "200000"]


def tool_request(url: str, tool: str, arguments: dict[str, object]) -> bytes:
    """Of the modern era: one message, one answer."""
    meta = {f"{META}/protocolVersion": MODERN, f"{META}/clientCapabilities": {}}
    params = {"name": tool, "arguments": arguments, "_meta": meta}
    headers = f"MCP-Protocol-Version: {MODERN}\r\nMcp-Method: tools/call\r\nMcp-Name: {tool}\r\n"
    return request("POST", url, {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}, headers)


def request(method: str, url: str, body: object, headers: str = "") -> bytes:
    parts, content = urlsplit(url), json.dumps(body).encode()
    accept = "Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n"
    head = (
        f"{method} {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{accept}{headers}Content-Length: {len(content)}\r\n"
    )
    return head.encode() + b"\r\n" + content


def take(server: Target, requests: list[bytes], seconds: float, *, is_same: bool = True) -> Taken:
    """As many clients as there are requests, each repeating its own. `is_same`: every answer must be like the first."""
    return asyncio.run(_take(server, requests, seconds, is_same))


def ask(url: str, content: bytes) -> dict[str, object]:
    async def once() -> bytes:
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(content)
        try:
            return await _answer(reader)
        finally:
            writer.close()

    return json.loads(asyncio.run(once()))


async def _take(server: Target, requests: list[bytes], seconds: float, is_same: bool) -> Taken:
    taken = Taken()
    cpu, began = server.cpu_s(), time.perf_counter()
    until = began + seconds
    await asyncio.gather(*(_client(server.url, content, until, taken, is_same) for content in requests))
    taken.took_s = time.perf_counter() - began
    taken.server_cpu_ms = 1000 * (server.cpu_s() - cpu) / len(taken.latencies_ms)
    return taken


async def _client(url: str, content: bytes, until: float, taken: Taken, is_same: bool) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    first: bytes | None = None
    while (began := time.perf_counter()) < until:
        writer.write(content)
        reply = await _answer(reader)
        taken.latencies_ms.append(1000 * (time.perf_counter() - began))
        if first is None:
            _check_good(first := reply)
        elif is_same and reply != first:
            raise RuntimeError(f"the same call is answered {reply[:200]!r} after {first[:200]!r}")
    writer.close()


def _check_good(reply: bytes) -> None:
    """A refusal is fast, and has status 200 as well."""
    found = json.loads(reply)
    if "error" in found or found.get("result", {}).get("isError"):
        raise RuntimeError(f"what is measured does not work: {reply[:200]!r}")


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the server answers {head.splitlines()[0].decode()}")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return await reader.readexactly(int(length.partition(b":")[2]))
