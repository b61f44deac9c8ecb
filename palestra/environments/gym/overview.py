"""A running gym for those who watch it: its servers, whether they are healthy, what they were asked for."""

from __future__ import annotations

import asyncio
import ssl
from functools import cache

import httpx
import msgspec
from msgspec import Struct

from palestra.types.gym_calls import RUN, STATS, PathCalls, ServerCalls
from palestra.util.json_types import JsonObject

TIMEOUT_S = 3.0
MAX_BYTES = 4 << 20
MAX_SERVERS = 500
HEALTHY = "healthy"


class GymServerState(Struct, frozen=True, kw_only=True):
    name: str
    kind: str
    """responses_api_agents, responses_api_models or resources_servers."""
    implementation: str
    url: str
    state: str
    """starting, healthy, restarting, failed or stopped."""
    pid: int | None
    uptime_s: float
    restarts: int
    per_s: float | None
    """Calls each second over the last minute. None, here and below: the server does not count."""
    running: int | None
    calls: int | None
    failed: int | None
    mean_s: float | None
    failures: dict[str, int]
    paths: list[PathCalls]


class GymOverview(Struct, frozen=True, kw_only=True):
    head: str
    problem: str
    """Why there is nothing to show; empty: a gym answers."""
    is_ready: bool = False
    """Whether all servers are healthy."""
    rollouts_per_s: float = 0.0
    """Rollouts of all agents each second, over the last minute."""
    rollouts: int = 0
    rollouts_running: int = 0
    rollouts_failed: int = 0
    servers: list[GymServerState] = []


async def read_gym(head: str) -> GymOverview:
    """The gym whose head server is at this address. Never raises: a gym that is away is a result."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, verify=_certificates()) as client:
        try:
            listed = await _fetch(client, f"{head}/server_instances")
            described = [one for one in listed if isinstance(one, dict)][:MAX_SERVERS]
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, TypeError) as error:
            return GymOverview(head=head, problem=str(error) or type(error).__name__)
        servers = await asyncio.gather(*(_server(client, one) for one in described))
    runs = [path for server in servers for path in server.paths if path.path == RUN]
    return GymOverview(
        head=head,
        problem="",
        is_ready=all(server.state == HEALTHY for server in servers),
        rollouts_per_s=sum(one.per_s for one in runs),
        rollouts=sum(one.calls for one in runs),
        rollouts_running=sum(one.running for one in runs),
        rollouts_failed=sum(one.failed for one in runs),
        servers=servers,
    )


@cache
def _certificates() -> ssl.SSLContext:
    """Reading them takes longer than all the questions to a gym on this machine."""
    return ssl.create_default_context()


async def _server(client: httpx.AsyncClient, described: JsonObject) -> GymServerState:
    url = str(described.get("url") or "")
    calls = await _calls(client, url) if described.get("state") == HEALTHY else None
    paths = calls.paths if calls else []
    done, seconds = sum(one.calls for one in paths), sum((one.mean_s or 0.0) * one.calls for one in paths)
    return GymServerState(
        name=str(described.get("config_path") or ""),
        kind=str(described.get("server_type") or ""),
        implementation=str(described.get("name") or ""),
        url=url,
        state=str(described.get("state") or described.get("status") or "unknown"),
        pid=pid if isinstance(pid := described.get("pid"), int) else None,
        uptime_s=_number(described.get("uptime_seconds")),
        restarts=int(_number(described.get("restarts"))),
        per_s=sum(one.per_s for one in paths) if calls else None,
        running=sum(one.running for one in paths) if calls else None,
        calls=done if calls else None,
        failed=sum(one.failed for one in paths) if calls else None,
        mean_s=seconds / done if done else None,
        failures=calls.failures if calls else {},
        paths=paths,
    )


async def _calls(client: httpx.AsyncClient, url: str) -> ServerCalls | None:
    """Returns what a server has counted. None if it does not count, as servers of other projects may."""
    try:
        return msgspec.convert(await _fetch(client, f"{url}{STATS}"), ServerCalls)
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, msgspec.ValidationError):
        return None


async def _fetch(client: httpx.AsyncClient, url: str) -> list[object] | JsonObject:
    async with client.stream("GET", url) as response:
        response.raise_for_status()
        body = b""
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MAX_BYTES:
                raise msgspec.DecodeError(f"the answer of {url} has more than {MAX_BYTES >> 20} MiB")
    return msgspec.json.decode(body)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
