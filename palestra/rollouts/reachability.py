"""Whether a server answers: looked at once, waited for, watched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

from palestra.episodes import EpisodeApiError, EpisodeClient, EpisodeClientError
from palestra.episodes.client import api
from palestra.episodes.client.retries import REACH_S
from palestra.rollouts.policy_sampler import PolicyError, ServerUnreachable

LOOK_EVERY_S = 5.0


async def until_unreachable(url: str, patience_s: float) -> str:
    """Returns a message when the server has not been reachable for `patience_s`. The SDK itself retries for very long,
    which is right while a server is restarted."""
    loop = asyncio.get_running_loop()
    last_seen = loop.time()
    while loop.time() - last_seen < patience_s:
        await asyncio.sleep(min(LOOK_EVERY_S, patience_s / 2))
        if await _is_reachable(url):
            last_seen = loop.time()
    return f"{url} has not answered for {patience_s:.0f} s; check the server"


def check_server(url: str) -> None:
    """Checks that a Tinker API answers at this address, so that a wrong address is reported within seconds. Raises
    PolicyError (ServerUnreachable if nothing answers), or ValueError if it is not an address."""
    try:
        with EpisodeClient(url) as client:
            client.do(api.health(REACH_S), retry_s=REACH_S)
    except EpisodeApiError as error:
        if error.status not in (401, 403):
            raise PolicyError(f"{url} answers, but it is not a server of the Tinker API: {error}") from None
    except EpisodeClientError as error:
        raise ServerUnreachable(f"{error}; is the server running, and is this its address (--server)?") from None


async def wait_reachable(url: str, patience_s: float, note: Callable[[str], None]) -> None:
    """Waits until the server answers. The SDK would try for ever and block the event loop meanwhile."""
    loop = asyncio.get_running_loop()
    deadline, has_said = loop.time() + patience_s, False
    note(f"looking for {url}")
    while not await _is_reachable(url):
        if loop.time() > deadline:
            raise ServerUnreachable(f"{url} cannot be reached; is the server running, and is this its address?")
        if not has_said:
            note(f"{url} does not answer; waiting up to {patience_s:.0f} s for it")
            has_said = True
        await asyncio.sleep(min(1.0, patience_s / 2))


async def _is_reachable(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(LOOK_EVERY_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
