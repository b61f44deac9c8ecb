"""The same calls on every face: the same bytes come back, and the same state is left."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from palestra.environments.fleet.backends.embedded import EmbeddedBackend
from palestra.environments.fleet.backends.remote import RemoteBackend
from palestra.environments.fleet.records import FleetTask
from palestra.environments.fleet.settings import FleetSettings
from palestra.environments.platform import APPS, Instance
from palestra.environments.platform.app import SeedDatabase
from palestra.environments.platform.attackers import words_of
from palestra.environments.platform.seeds import seed_named
from palestra.environments.random_calls import random_value
from tests.environments.platform.api.conftest import Platform
from tests.environments.platform.api.test_mcp import modern
from tests.environments.platform.api.test_openenv import connected

DATA = "small-0"
Calls = list[tuple[str, dict[str, Any]]]
Said = Callable[[str, dict[str, Any]], str]


def some_calls(seed: SeedDatabase, rng: random.Random) -> Calls:
    """What the schemas allow, with words of this world; sometimes a tool or an argument that is not there."""
    found: Calls = []
    for _ in range(rng.randint(1, 8)):
        tool = rng.choice(seed.app.tools)
        known, expected = tool.parameters["properties"], tool.parameters["required"]
        taken = [name for name in known if name in expected or rng.random() < 0.3]
        arguments = {name: random_value(rng, known[name], words_of(seed)) for name in taken}
        found.append((rng.choice([tool.name] * 9 + ["nothing"]), arguments | ({"é": 1} if rng.random() < 0.1 else {})))
    return found


@contextmanager
def face_of(platform: Platform, name: str, app: str) -> Iterator[Said]:
    """Says what a tool's result is, as text."""
    if name == "openenv":
        with connected(platform, f"{app}/ws") as player:

            def stepped(tool: str, arguments: dict[str, Any]) -> str:
                action = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
                response: Any = player.said({"type": "step", "data": action})
                for field in ("data", "observation", "result"):
                    response = msgspec.json.decode(response, type=dict[str, msgspec.Raw])[field]
                return bytes(response).decode()

            yield stepped
    elif name == "openenv-mcp":
        with connected(platform, f"{app}/mcp") as talker:
            yield lambda tool, arguments: text_of(talker.said(called(tool, arguments)))
    else:
        made = platform.stranger.post("/v1/env/instances", json={"env_key": app, "data_key": DATA}).json()
        path = f"/i/{made['instance_id']}/mcp"

        def posted(tool: str, arguments: dict[str, Any]) -> str:
            if name == "mcp":
                return text_of(platform.stranger.post(path, json=called(tool, arguments)).text)
            message, headers = modern("tools/call", name=tool, arguments=arguments)
            return text_of(platform.stranger.post(path, json=message, headers=headers).text)

        yield posted
        platform.stranger.delete(f"/v1/env/instances/{made['instance_id']}")


def called(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}


def text_of(answer: str) -> str:
    (block,) = json.loads(answer)["result"]["content"]
    return block["text"]


def alive(platform: Platform) -> set[str]:
    return {record.id for record in platform.pool.records("local") if not record.is_over}


@pytest.mark.parametrize("face", ["mcp", "mcp-modern", "openenv", "openenv-mcp"])
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(app=st.sampled_from(sorted(APPS)), number=st.integers(0, 2**32))
def test_the_same_calls_give_the_same_bytes_and_the_same_state(platform: Platform, face: str, app: str, number: int):
    seed, before = seed_named(APPS[app], DATA), alive(platform)
    alone = Instance(seed)
    with face_of(platform, face, app) as said:
        for tool, arguments in some_calls(seed, random.Random(number)):
            assert said(tool, arguments) == alone.call(tool, arguments).text
        (played,) = alive(platform) - before
        with platform.pool.use(played) as instance:
            assert instance.state_hash() == alone.state_hash()
    alone.close()


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(app=st.sampled_from(sorted(APPS)), number=st.integers(0, 2**32))
def test_the_same_calls_give_the_same_through_either_backend(platform: Platform, app: str, number: int):
    task = FleetTask.of({"task_key": "any", "prompt": "p", "env_key": app, "data_key": DATA})
    calls = some_calls(seed_named(APPS[app], DATA), random.Random(number))

    async def answers() -> list[list[Any]]:
        backends = EmbeddedBackend(task, FleetSettings()), RemoteBackend(task, FleetSettings(base_url=platform.url))
        found: list[list[Any]] = []
        for backend in backends:
            await backend.create()
            found.append([await backend.list_tools(), *[await backend.call_tool(*one) for one in calls]])
            await backend.close()
        return found

    here, elsewhere = asyncio.run(answers())
    assert here == elsewhere
