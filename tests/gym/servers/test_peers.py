"""Calls between servers: the same answers near and far, time limits, and what is said again when a server goes away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.gym.errors import GymConfigError, UnreachableServer
from palestra.gym.peers import GymPeers
from palestra.gym.records import ServerKind
from palestra.gym.servers.base import GymServer
from palestra.gym.wire import GymRequest, GymResponse
from tests.gym.servers.conftest import SECRET, Counter, Gym, ScriptModel, gym_of, listening
from tests.properties import examples

VALUES = st.one_of(st.integers(-3, 3), st.text(max_size=3), st.none(), st.lists(st.integers(0, 1), max_size=2))
BODIES = st.one_of(
    VALUES,
    st.dictionaries(st.sampled_from(["count", "by", "initial_count", "expected_count", "response", "name"]), VALUES),
)
PATHS = st.sampled_from(
    [
        *("/seed_session", "/add", "/add", "/show", "/divide", "/verify", "/aggregate_metrics", "/close_session"),
        *("/ask", "/unspeakable", "/unknown", "/ng-rollout/x/show", "/ng-rollout/!/show", "/ü", "/show/", "/reset"),
    ]
)


@examples(60)
@given(calls=st.lists(st.tuples(PATHS, BODIES), min_size=1, max_size=8))
def test_near_and_far_give_the_same_answers(gym: Gym, calls: list[tuple[str, Any]]) -> None:
    async def response(peers: GymPeers) -> list[Any]:
        found, cookies, sessions = [], {}, set()
        for path, body in calls:
            answer = await peers.post("counter", path, body, cookies=cookies)
            cookies = answer.cookies
            sessions.add(*cookies.values())
            text = answer.raw().decode()
            for one in sessions:
                text = text.replace(one.rpartition(".")[0], "<session>")
            found.append((answer.status, text, answer.content_type, list(answer.cookies)))
        return [*found, len(sessions)]

    assert gym.run(response(gym.near)) == gym.run(response(gym.far))


def test_an_unknown_server_is_told_with_the_nearest(gym: Gym) -> None:
    with pytest.raises(GymConfigError, match=r"unknown server 'countr'(.|\n)*did you mean counter\?"):
        gym.post("countr", "/add", {})


class Slow(GymServer):
    kind = ServerKind.RESOURCES

    async def open(self) -> None:
        self.is_over = asyncio.Event()

    async def answer(self, call: GymRequest) -> GymResponse:
        await self.is_over.wait()
        return GymResponse()


@pytest.mark.parametrize("is_near", [True, False])
def test_a_server_that_hangs_is_not_waited_for(gym: Gym, is_near: bool) -> None:
    config = gym_of({"slow": (Slow, {})})

    async def tried() -> None:
        async with GymPeers(config) as peers:
            server = Slow(config.servers["slow"], peers)
            stop = await listening(server, SECRET)
            if is_near:
                peers.add(server)
            try:
                await peers.post("slow", "/verify", {}, timeout_s=0.05)
            finally:
                server.is_over.set()
                await stop()

    with pytest.raises(UnreachableServer, match=r"slow: no answer to /verify within 0.05 s"):
        gym.run(tried())


def test_a_server_that_is_being_started_is_waited_for(gym: Gym) -> None:
    config = gym_of({"counter": (Counter, {})})

    async def tried() -> GymResponse:
        async with GymPeers(config) as peers:
            request = asyncio.create_task(peers.post("counter", "/seed_session", {}))
            await asyncio.sleep(0.1)
            assert not request.done()
            stop = await listening(Counter(config.servers["counter"], peers), SECRET)
            try:
                return await request
            finally:
                await stop()

    assert gym.run(tried()).status == 200


def test_a_server_that_stays_away_is_given_up(gym: Gym) -> None:
    config = gym_of({"counter": (Counter, {})}, peer_reconnect_s=0.1)
    with pytest.raises(UnreachableServer, match=r"counter: no connection for 0.1 s"):
        gym.run(GymPeers(config).post("counter", "/add", {}))


class Dropping:
    """Takes each request whole and hangs up; the last ones get an answer."""

    def __init__(self, drops: int) -> None:
        self.drops, self.seen = drops, 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        self.seen += 1
        if self.seen > self.drops:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        writer.close()


async def dropped(server: type[GymServer], path: str, body: Any, drops: int) -> tuple[Dropping, Any]:
    config = gym_of({"one": (server, {})})
    dropping = Dropping(drops)
    listener = await asyncio.start_server(dropping, "127.0.0.1", config.servers["one"].port)
    async with listener, GymPeers(config) as peers:
        try:
            return dropping, await peers.post("one", path, body)
        except UnreachableServer as error:
            return dropping, error


@pytest.mark.parametrize(
    ("server", "path", "body"),
    [
        (Counter, "/verify", {}),
        (Counter, "/seed_session", {}),
        (Counter, "/step", {"_ng_step_request_id": "1"}),
        (ScriptModel, "/v1/responses", {}),
        (ScriptModel, "/ng-rollout/a/v1/responses", {}),
    ],
)
def test_what_may_be_said_again_is(gym: Gym, server: type[GymServer], path: str, body: Any) -> None:
    dropping, answer = gym.run(dropped(server, path, body, drops=2))
    assert (dropping.seen, answer.status) == (3, 200)
    dropping, error = gym.run(dropped(server, path, body, drops=9))
    assert dropping.seen == 3
    assert isinstance(error, UnreachableServer)


@pytest.mark.parametrize(("path", "body"), [("/add", {"count": 1}), ("/step", {}), ("/run", {})])
def test_what_may_have_begun_is_not_said_again(gym: Gym, path: str, body: Any) -> None:
    dropping, error = gym.run(dropped(Counter, path, body, drops=1))
    assert dropping.seen == 1
    assert isinstance(error, UnreachableServer)
    assert "was interrupted" in str(error)


def test_cookies_of_others_pass_unchanged(gym: Gym) -> None:
    """A stock server's cookie has what it likes in it."""

    class Setting(GymServer):
        kind = ServerKind.RESOURCES

        async def answer(self, call: GymRequest) -> GymResponse:
            return GymResponse(body=dict(call.cookies), cookies={"odd": 'a b; "c", ü', "plain": "eyJ4IjogMX0=.aXx.z-_"})

    async def tried() -> GymResponse:
        config = gym_of({"setting": (Setting, {})})
        async with GymPeers(config) as peers:
            stop = await listening(Setting(config.servers["setting"], peers), SECRET)
            try:
                first = await peers.post("setting", "/x", {})
                return await peers.post("setting", "/x", {}, cookies=first.cookies)
            finally:
                await stop()

    seen = json.loads(gym.run(tried()).raw())
    assert seen["plain"] == "eyJ4IjogMX0=.aXx.z-_"
    assert seen["odd"].startswith('a b; "c", ')
