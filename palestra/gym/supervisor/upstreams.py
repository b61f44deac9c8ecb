"""The model endpoints behind a gym's model servers: is somebody there?

Owns: finding their addresses in the settings, waiting for them, bounded. Never touches: what they serve.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from palestra.gym.config.settings import READINESS
from palestra.gym.errors import ServerStartError
from palestra.gym.records import GymConfig, ServerKind
from palestra.gym.supervisor.probes import NoAnswer, get

PROBE_S = 5.0
PAUSE_S = 1.0
TELL_S = 15.0


def upstreams(config: GymConfig) -> Iterator[tuple[str, str]]:
    """Addresses, and the key that each was first given by."""
    seen: set[str] = set()
    for server in config.of_kind(ServerKind.MODEL):
        for key, value in server.settings.items():
            if not key.endswith("base_url"):
                continue
            for url in value if isinstance(value, list) else [value]:
                if isinstance(url, str) and url.startswith(("http://", "https://")) and url not in seen:
                    seen.add(url)
                    yield url, f"{server.name}.{server.kind}.{server.implementation}.{key}"


async def wait_for_upstreams(config: GymConfig, tell: Callable[[str], None]) -> None:
    """Any answer counts. Raises ServerStartError with those that gave none in time."""
    limit_s = config.settings[READINESS]
    if not limit_s:
        return
    found = list(upstreams(config))
    results = await asyncio.gather(*(_wait(url, limit_s, tell) for url, _ in found))
    silent = [(url, key, problem) for (url, key), problem in zip(found, results, strict=True) if problem]
    if silent:
        lines = "".join(f"\n  {url} ({key}): {problem}" for url, key, problem in silent)
        raise ServerStartError(
            f"nobody answers at {len(silent)} model endpoints within {limit_s:g} s:{lines}\n"
            f"  start them, correct the keys, or skip the check: ++{READINESS}=0"
        )


async def _wait(url: str, limit_s: float, tell: Callable[[str], None]) -> str | None:
    asked = f"{url.rstrip('/')}/models" if url.rstrip("/").endswith("/v1") else url
    until = time.monotonic() + limit_s
    tell_at = time.monotonic() + TELL_S
    while True:
        try:
            await get(asked, min(PROBE_S, limit_s))
            return None
        except NoAnswer as error:
            if time.monotonic() + PAUSE_S > until:
                return str(error)
            if time.monotonic() > tell_at:
                tell(f"waiting for the model endpoint {url} ({error})")
                tell_at += TELL_S
        await asyncio.sleep(PAUSE_S)
