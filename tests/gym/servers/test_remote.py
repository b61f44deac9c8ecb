"""The remote agent: a service of somebody's plays, and whatever it does, a row comes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from palestra.gym.agents import RemoteAgent
from palestra.gym.errors import GymConfigError
from palestra.gym.peers import GymPeers
from palestra.gym.wire import GymResponse
from palestra.types.gym import PARAMS
from tests.gym.servers.conftest import Counter, Gym, all_of, gym_of, listening
from tests.ports import free_port

Reply = tuple[int, bytes]
Service = Callable[[dict[str, Any], str], Reply | None]
"""The body and the Cookie header of a request; None: it hangs up."""


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def answered(*items: dict[str, Any]) -> Reply:
    return 200, json.dumps({"id": "r", "output": list(items), "usage": None}).encode()


async def speak(service: Service, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        body = json.loads(await reader.readexactly(int(fields["content-length"])))
        response = service(body, fields.get("cookie", ""))
        if response is not None:
            extra = "location: http://elsewhere/\r\n" if response[0] == 307 else ""
            head = f"HTTP/1.1 {response[0]} X\r\nset-cookie: seat=7\r\n{extra}connection: close\r\n"
            writer.write(f"{head}content-length: {len(response[1])}\r\n\r\n".encode() + response[1])
            await writer.drain()
    finally:
        writer.close()


@contextmanager
def playing(gym: Gym, service: Service | None, **settings: Any) -> Iterator[Callable[..., GymResponse]]:
    """`run(**row)` of an agent whose service this is; None: nobody listens there."""
    port = free_port()
    own = {"agent_base_url": f"http://127.0.0.1:{port}/", "resources_server": {"name": "counter"}, **settings}
    config = gym_of({"counter": (Counter, {}), "remote": (RemoteAgent, own)})
    peers = GymPeers(config)
    servers = [Counter(config.servers["counter"], peers)]

    async def start() -> list[Any]:
        remote = RemoteAgent(config.servers["remote"], peers)
        stops = [await listening(one, config.secret) for one in (*servers, remote)]
        if service is not None:
            response = await asyncio.start_server(lambda r, w: speak(service, r, w), "127.0.0.1", port)

            async def stop() -> None:
                response.close()
                await response.wait_closed()

            stops.append(stop)
        return stops

    stops = gym.run(start())
    try:
        yield lambda **row: gym.run(peers.post("remote", "/run", {PARAMS: {"input": "go"}, "expected_count": 0, **row}))
    finally:
        gym.run(all_of(stop() for stop in stops))
        gym.run(peers.__aexit__(None, None, None))


def test_calls_that_the_service_leaves_open_are_run_here(gym: Gym) -> None:
    seen: list[tuple[dict[str, Any], str]] = []

    def service(body: dict[str, Any], cookie: str) -> Reply:
        seen.append((body, cookie))
        own = {"type": "function_call", "call_id": "own", "name": "verify", "arguments": "{}"}
        if len(seen) == 1:
            result = {"type": "function_call_output", "call_id": "own", "output": "mine"}
            call = {"type": "function_call", "call_id": "open", "name": "add", "arguments": '{"count": 2}'}
            return answered(own, result, call)
        return answered(message("done"))

    with playing(gym, service) as run:
        found = run(initial_count=1, expected_count=3).value()
    assert (found["reward"], found["count"]) == (1.0, 3)
    outputs = [(one["call_id"], one["output"]) for one in found["response"]["output"] if "output" in one]
    assert outputs == [("own", "mine"), ("open", '{"count":3}')]
    assert [cookie for _, cookie in seen] == ["", "seat=7"]
    assert set(seen[0][0]) == {"input"}  # what the row says, nothing of ours
    assert len(seen[1][0]["input"]) == 5


@pytest.mark.parametrize(
    ("reply", "words", "is_terminal"),
    [
        ((500, b"out of order"), "answered 500: out of order", None),
        ((307, b""), "answered 307", None),
        ((200, b"<html>"), "no Responses object: <html>", True),
        ((200, b'{"output": [{"role": "x"}]}'), "no Responses object", True),
    ],
)
def test_a_service_that_fails_is_a_row_for_the_failures(gym: Gym, reply: Reply, words: str, is_terminal: Any) -> None:
    with playing(gym, lambda body, cookie: reply) as run:
        answer = run(reward=5, error="old", _ng_no_persist=True)
    found = answer.value()
    assert (answer.status, found["reward"], found["_ng_failure_class"]) == (200, 0.0, "remote_agent_error")
    assert words in found["error"]
    assert words in found["failure_reason"]
    assert found.get("_ng_failure_terminal") == is_terminal
    assert "_ng_no_persist" not in found
    assert found["response"]["output"][0]["type"] == "message"


def test_a_service_that_is_not_there(gym: Gym, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palestra.gym.agents.remote.WAIT_S", 0.0)
    with playing(gym, None) as run:
        assert "Is the service running?" in run().value()["error"]
    with playing(gym, lambda body, cookie: None) as run:
        assert "in 3 tries" in run().value()["error"]


def test_time_limits_are_told_by_their_settings(gym: Gym) -> None:
    with playing(gym, lambda body, cookie: answered(message("hi")), run_timeout_secs=0.0) as run:
        assert "run_timeout_secs = 0" in run().value()["error"]


def test_a_world_that_fails_is_a_row_too(gym: Gym) -> None:
    with playing(gym, lambda body, cookie: answered(message("hi"))) as run:
        found = run(initial_count="many").value()
    assert (found["_ng_failure_class"], found["_ng_failure_terminal"]) == ("row_refused", True)
    assert "initial_count" in found["error"]


@pytest.mark.parametrize(
    "url", ["localhost:80", "ftp://x", "http://", "http://user:pass@x", "http://x?y=1", "http://x#y"]
)
def test_a_url_that_cannot_be_is_refused_at_once(url: str) -> None:
    config = gym_of({"remote": (RemoteAgent, {"agent_base_url": url, "resources_server": {"name": "counter"}})})
    with pytest.raises(GymConfigError, match="agent_base_url"):
        RemoteAgent(config.servers["remote"], GymPeers(config))
