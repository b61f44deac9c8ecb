"""Many at once over HTTP and WebSockets, with clients that fail, vanish and are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from palestra.environments.platform.api.auth import LOCAL_TEAM, PlatformAuth
from palestra.environments.platform.pool import InstancePool
from palestra.environments.platform.pool_records import PoolLimits
from tests.environments.platform.api.conftest import KEY, Platform, started

pytestmark = pytest.mark.slow

EPISODES, AT_ONCE, CROWD = 2000, 40, 500


class Clock:
    ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def crowded(clock: Clock) -> Iterator[Platform]:
    """With memory for about a hundred: the others wait on disk."""
    with InstancePool(PoolLimits(max_resident_bytes=10 << 20), clock=clock) as pool:
        for url in started(pool, PlatformAuth(secret=b"of the tests")):
            yield Platform(pool, url)


def client_of(platform: Platform) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=AT_ONCE)
    return httpx.AsyncClient(
        base_url=platform.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120, limits=limits
    )


async def make(client: httpx.AsyncClient) -> str:
    answer = await client.post("/v1/env/instances", json={"env_key": "keys"})
    answer.raise_for_status()
    return answer.json()["instance_id"]


async def put(client: httpx.AsyncClient, instance_id: str, value: object) -> bool:
    params = {"name": "put", "arguments": {"value": value}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    answer = await client.post(f"/i/{instance_id}/mcp", json=message)
    answer.raise_for_status()
    return not answer.json()["result"]["isError"]


async def episode(client: httpx.AsyncClient, rng: random.Random) -> None:
    instance_id = await make(client)
    for value in (1, "wrong", 2):
        await put(client, instance_id, value)
    if rng.random() < 0.3:
        return  # never closed, as the reference does it
    await client.delete(f"/v1/env/instances/{instance_id}")


@pytest.mark.timeout(600)
def test_episodes_that_fail_vanish_and_are_cancelled_leave_nothing(crowded: Platform, clock: Clock):
    async def play() -> int:
        room, cancelled = asyncio.Semaphore(AT_ONCE), 0
        async with client_of(crowded) as client:

            async def one(number: int) -> None:
                nonlocal cancelled
                rng = random.Random(number)
                async with room:
                    playing = asyncio.ensure_future(episode(client, rng))
                    if rng.random() < 0.3:
                        await asyncio.sleep(rng.random() * 0.02)
                        cancelled += playing.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await playing

            await asyncio.gather(*(one(number) for number in range(EPISODES)))
        return cancelled

    assert asyncio.run(play()) > 0
    usage = crowded.pool.usage()
    assert 0 < usage.instances < EPISODES
    clock.ahead_s += 700
    crowded.pool.tick()
    left = crowded.pool.usage()
    assert (left.instances, left.resident, left.resident_bytes, left.spilled) == (0, 0, 0, 0)
    assert not list((crowded.pool.files.folder / "instances").iterdir())
    clock.ahead_s += 700
    crowded.pool.tick()
    assert crowded.pool.usage().known == 0


async def socket_episode(url: str, rng: random.Random) -> None:
    """Ends as clients do: with a word, with none, in the middle of a message, or in an error of its own."""
    path = rng.choice(["ws", "ws", "mcp"])
    async with connect(f"{url.replace('http', 'ws', 1)}/openenv/keys/{path}", proxy=None) as socket:
        call = {"type": "step", "data": {"tool_name": "put", "arguments": {"value": 3}}}
        messages = [
            '{"type": "reset"}',
            json.dumps(call),
            "{",
            '{"type": "dance"}',
            '{"jsonrpc": "2.0"}',
            json.dumps(call),
        ]
        for message in messages:
            await socket.send(message)
            if rng.random() < 0.1:
                socket.transport.abort()
                return
            await socket.recv()
            if rng.random() < 0.05:
                raise ValueError("a client that breaks")
        if rng.random() < 0.5 and path == "ws":
            await socket.send('{"type": "close"}')


@pytest.mark.timeout(600)
def test_websockets_that_fail_vanish_and_are_cancelled_leave_nothing_and_nobody_has_to_wait(crowded: Platform):
    ends: Counter[str] = Counter()

    async def play() -> None:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            rng = random.Random(number)
            async with room:
                playing = asyncio.ensure_future(socket_episode(crowded.url, rng))
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.05)
                    playing.cancel()
                try:
                    await playing
                    ends["done"] += 1
                except (asyncio.CancelledError, ValueError, ConnectionClosed) as e:
                    ends[type(e).__name__] += 1

        await asyncio.gather(*(one(number) for number in range(EPISODES)))

    asyncio.run(play())
    assert min(ends[kind] for kind in ("done", "CancelledError", "ValueError")) > 20
    until = time.monotonic() + 60
    while crowded.pool.usage().instances and time.monotonic() < until:
        time.sleep(0.05)
    left = crowded.pool.usage()
    assert (left.instances, left.resident, left.resident_bytes, left.spilled) == (0, 0, 0, 0)
    assert left.known >= EPISODES / 2
    assert all(record.holders == record.users == 0 for record in crowded.pool.records(LOCAL_TEAM))
    assert not list((crowded.pool.files.folder / "instances").iterdir())


@pytest.mark.timeout(600)
def test_hundreds_of_instances_at_once_keep_their_states_apart(crowded: Platform):
    async def play() -> list[list[list[int]]]:
        async with client_of(crowded) as client:
            ids = await asyncio.gather(*(make(client) for _ in range(CROWD)))
            for turn in range(4):
                done = await asyncio.gather(*(put(client, one, 10 * n + turn) for n, one in enumerate(ids)))
                assert all(done)
            query = {"query": "SELECT value FROM numbers ORDER BY id"}
            path = "/i/{}/api/v1/env/resources/sqlite/current/query"
            answers = await asyncio.gather(*(client.post(path.format(one), json=query) for one in ids))
            return [answer.json()["rows"] for answer in answers]

    assert asyncio.run(play()) == [[[10 * n + turn] for turn in range(4)] for n in range(CROWD)]
    usage = crowded.pool.usage()
    assert usage.instances == CROWD
    assert usage.spilled > CROWD / 2
