"""Checks whether servers and model endpoints answer, under the right name: one small GET with a time limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from palestra.gym.config.settings import READINESS
from palestra.gym.errors import ServerStartError
from palestra.gym.records import GymConfig, ServerKind
from palestra.net.http_client import CallFailed, HttpClient, HttpReply

NAME_HEADER = "x-gym-server"


class NoAnswer(Exception):
    """There was no answer; the text says why."""


async def get(url: str, timeout_s: float) -> HttpReply:
    """Returns status and headers of the answer, on a connection of its own. Raises NoAnswer.

    Certificates are not checked: nothing is sent but GET, and any answer shows that there is a server.
    """
    try:
        async with HttpClient(connect_s=None) as client:
            return await client.probe(url, timeout_s=timeout_s)
    except TimeoutError:
        raise NoAnswer(f"no answer in {timeout_s:g} s") from None
    except CallFailed as error:
        raise NoAnswer(str(error)) from None


async def check_server(name: str, host: str, port: int, timeout_s: float) -> None:
    """Returns if the server of that name is healthy. Raises NoAnswer."""
    answer = await get(f"http://{reachable(host)}:{port}/", timeout_s)
    if answer.status != 200:
        raise NoAnswer(f"answers with status {answer.status}")
    name_there = answer.headers.get(NAME_HEADER, name)
    if name_there != name:
        raise NoAnswer(f"the server {name_there!r} answers there")


def reachable(host: str) -> str:
    """Returns an address that can be connected to: an address for all interfaces becomes loopback, and an IPv6 address
    gets brackets."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1" if host != "::" else "[::1]"
    return f"[{host}]" if ":" in host else host


PROBE_S = 5.0
PAUSE_S = 1.0
TELL_S = 15.0


def upstreams(config: GymConfig) -> Iterator[tuple[str, str]]:
    """Yields addresses, and the setting that named each first."""
    seen: set[str] = set()
    for server in config.of_kind(ServerKind.MODEL):
        for key, value in server.settings.items():
            if not key.endswith("base_url"):
                continue
            for url in value if isinstance(value, list) else [value]:
                if isinstance(url, str) and url.startswith(("http://", "https://")) and url not in seen:
                    seen.add(url)
                    yield url, f"{server.name}.{server.kind}.{server.implementation}.{key}"


async def wait_for_upstreams(config: GymConfig, report: Callable[[str], None]) -> None:
    """Waits for the endpoints; any answer counts. Raises ServerStartError with those that did not answer in time."""
    limit_s = config.settings[READINESS]
    if not limit_s:
        return
    found = list(upstreams(config))
    results = await asyncio.gather(*(_wait(url, limit_s, report) for url, _ in found))
    silent = [(url, key, problem) for (url, key), problem in zip(found, results, strict=True) if problem]
    if silent:
        lines = "".join(f"\n  {url} ({key}): {problem}" for url, key, problem in silent)
        raise ServerStartError(
            f"{len(silent)} model endpoints did not answer within {limit_s:g} s:{lines}\n"
            f"  start them, correct the keys, or skip the check: ++{READINESS}=0"
        )


async def _wait(url: str, limit_s: float, report: Callable[[str], None]) -> str | None:
    probed = f"{url.rstrip('/')}/models" if url.rstrip("/").endswith("/v1") else url
    until = time.monotonic() + limit_s
    tell_at = time.monotonic() + TELL_S
    while True:
        try:
            await get(probed, min(PROBE_S, limit_s))
            return None
        except NoAnswer as error:
            if time.monotonic() + PAUSE_S > until:
                return str(error)
            if time.monotonic() > tell_at:
                report(f"waiting for the model endpoint {url} ({error})")
                tell_at += TELL_S
        await asyncio.sleep(PAUSE_S)
