"""A few servers of every kind, really listening, on one loop in a thread; and the means to call them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from palestra.gym.agents import GymnasiumAgent, SimpleAgent
from palestra.gym.errors import JudgeError
from palestra.gym.http_app import GymHttpApp
from palestra.gym.peers import GymPeers
from palestra.gym.records import GymConfig, ServerInstance, ServerKind
from palestra.gym.servers.base import GymServer
from palestra.gym.servers.gymnasium import GymnasiumServer, Start, Step
from palestra.gym.servers.relays import LegacyAgent
from palestra.gym.servers.resources import ResourcesServer, ReverifyMode, Verdict, tool
from palestra.gym.servers.responses import output_text
from palestra.gym.servers.states import Session
from palestra.gym.wire import GymRequest, GymResponse
from palestra.net.serving import HttpServer
from tests.ports import free_port

T = TypeVar("T")
SECRET = "a secret of the tests"
REF = {"resources_server": {"type": "resources_servers", "name": "counter"}, "model_server": {"name": "model"}}


class Counter(ResourcesServer):
    reverify_mode = ReverifyMode.UNSUPPORTED

    async def seed_session(self, session: Session, initial_count: int = 0) -> None:
        session.state = initial_count

    @tool
    async def add(self, session: Session, count: int) -> dict[str, int]:
        """Add to the counter."""
        session.state += count
        return {"count": session.state}

    @tool
    def show(self, session: Session) -> str:
        """The counter in words."""
        return f"it is {session.state}"

    @tool
    def divide(self, by: int) -> float:
        return 1 / by

    @tool
    def unspeakable(self) -> Any:
        return {1, 2}

    @tool
    async def ask(self, name: str) -> Any:
        """What a peer of this name says."""
        return (await self.peers.post(name, "/nowhere", {})).status

    async def verify(self, session: Session, response: dict[str, Any], expected_count: int) -> Verdict:
        if output_text(response) == "judge me":
            raise JudgeError("the judge sleeps")
        if output_text(response) == "break":
            raise ZeroDivisionError("division by zero")
        return Verdict(float(session.state == expected_count), {"count": session.state})


class Guess(GymnasiumServer):
    """Three tries for a number; a function call `hint` is answered."""

    async def reset(self, session: Session, secret: int) -> Start:
        session.state = (secret, 0)
        return Start(observation="Guess a number.", info={"tries": 3})

    async def step(self, session: Session, response: dict[str, Any]) -> Step:
        secret, tries = session.state
        session.state = (secret, tries + 1)
        calls = [one["call_id"] for one in response["output"] if one["type"] == "function_call"]
        if calls:
            return Step(info={"tool_outputs": [{"call_id": one, "output": "even"} for one in calls]})
        if output_text(response).strip() == str(secret):
            return Step(reward=1.0, terminated=True, info={"tries": tries + 1})
        return Step(observation="No.", reward=-0.25, truncated=tries == 2)


class ScriptModel(GymServer):
    """Says what the input's first message lists: JSON of turns, each a text, `{name: arguments}`, or a whole answer."""

    kind = ServerKind.MODEL

    async def answer(self, call: GymRequest) -> GymResponse:
        if call.path != "/v1/responses":
            return GymResponse(status=404, body={"detail": "Not Found"})
        turns = json.loads(call.body["input"][0]["content"])
        number = sum(1 for item in call.body["input"] if item.get("id") == "out")
        turn = turns[number] if number < len(turns) else "no more turns"
        if isinstance(turn, dict) and "status" in turn:
            return GymResponse(status=turn["status"], body=turn["body"])
        items = [_item(turn)] if isinstance(turn, str) else [_item(turn, name) for name in turn]
        marked = [*items[:-1], {**items[-1], "id": "out"}]
        usage = {
            "input_tokens": 2,
            "output_tokens": 1,
            "total_tokens": 3,
            "input_tokens_details": {"cached_tokens": None},
        }
        response = {
            "id": "resp_1",
            "output": marked,
            "usage": usage,
            "rollout": call.rollout_id,
            "captured": call.captures_tokens,
            "session": call.session_id,
        }
        return GymResponse(
            body=response | {"incomplete_details": {"reason": "max_output_tokens"} if turn == "cut" else None}
        )


def _item(turn: Any, name: str | None = None) -> dict[str, Any]:
    if name is None:
        content = [{"type": "output_text", "text": turn, "annotations": []}]
        return {"type": "message", "role": "assistant", "content": content}
    if name == "think":
        return {"type": "reasoning", "summary": []}
    arguments = turn[name] if isinstance(turn[name], str) else json.dumps(turn[name])
    return {"type": "function_call", "call_id": f"c_{name}", "name": name, "arguments": arguments}


CLASSES: dict[str, tuple[type[GymServer], dict[str, Any]]] = {
    "counter": (Counter, {}),
    "shown": (Counter, {"expose_tools_over_mcp": True}),
    "guess": (Guess, {}),
    "model": (ScriptModel, {}),
    "agent": (SimpleAgent, REF | {"max_steps": 6}),
    "unjudged": (SimpleAgent, REF | {"skip_verification": True, "skip_verification_reward": 0.5}),
    "kept": (SimpleAgent, REF | {"token_id_capture": True}),
    "hasty": (SimpleAgent, REF | {"rollout_timeout_s": 0.0}),
    "front": (LegacyAgent, {"agent_server": {"type": "responses_api_agents", "name": "agent"}}),
    "player": (GymnasiumAgent, REF | {"resources_server": {"name": "guess"}, "max_steps": 4}),
}


def gym_of(classes: dict[str, tuple[type[GymServer], dict[str, Any]]], **settings: Any) -> GymConfig:
    servers = {
        name: ServerInstance(
            name=name, kind=one.kind, implementation=name, settings=own, host="127.0.0.1", port=free_port()
        )
        for name, (one, own) in classes.items()
    }
    return GymConfig(servers=servers, settings=settings, head_host="127.0.0.1", head_port=0, secret=SECRET)


class Gym:
    """Every server listens on its port. `far` reaches them over HTTP, `near` within their process, on their loop."""

    def __init__(self, config: GymConfig, near: GymPeers, far: GymPeers, loop: asyncio.AbstractEventLoop) -> None:
        self.config, self.near, self.far, self._loop = config, near, far, loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def post(self, name: str, path: str, body: Any, **more: Any) -> GymResponse:
        return self.run(self.far.post(name, path, body, **more))

    def url(self, name: str) -> str:
        return self.config.servers[name].url


class Quiet(HttpServer):
    """Says when it is up."""

    def __init__(self, app: Any, **settings: Any) -> None:
        super().__init__(app, **settings)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


@contextmanager
def serving(
    classes: dict[str, tuple[type[GymServer], dict[str, Any]]], *, is_shared: bool, **settings: Any
) -> Iterator[Gym]:
    """`is_shared`: they call each other without HTTP."""
    config = gym_of(classes, **settings)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="gym", daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    near, far = GymPeers(config), GymPeers(config)
    servers = [one(config.servers[name], near if is_shared else far) for name, (one, _) in classes.items()]
    for server in servers:
        near.add(server)
    stops = [run(listening(server, config.secret)) for server in servers]
    try:
        yield Gym(config, near, far, loop)
    finally:
        run(all_of(stop() for stop in stops))
        run(near.__aexit__(None, None, None))
        run(far.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def all_of(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*work)


async def listening(server: GymServer, secret: str, **more: Any) -> Callable[[], Coroutine[Any, Any, None]]:
    """Until what it returns is called."""
    await server.open()
    port = server.instance.port
    http = Quiet(GymHttpApp(server, secret, **more), port=port, lifespan="off", log_config=None)
    task = asyncio.create_task(http.serve(), name=f"serve {server.name}")
    await http.is_up.wait()

    async def stop() -> None:
        http.should_exit = True
        http.force_exit = True
        await task
        await server.close()

    return stop


@pytest.fixture(scope="session")
def gym() -> Iterator[Gym]:
    """Over HTTP among each other, too."""
    with serving(CLASSES, is_shared=False, observability_enabled=True, token_id_capture={"enabled": True}) as found:
        yield found


@pytest.fixture(scope="session")
def shared_gym() -> Iterator[Gym]:
    with serving(CLASSES, is_shared=True, observability_enabled=True, token_id_capture={"enabled": True}) as found:
        yield found
