"""Calls of a server to another end, whatever the other does; what may not be said twice is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import yaml

from palestra.gym.nemo_gym_compat import COMPAT

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
def client_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Any]:
    """Of a gym that has one server, of some kind, at a port."""
    monkeypatch.syspath_prepend(str(COMPAT))
    from nemo_gym.server_utils import ServerClient

    def made(kind: str, port: int) -> Any:
        config = {
            "there": {kind: {"any": {"host": "127.0.0.1", "port": port}}},
            "head_server": {"host": "127.0.0.1", "port": 1},
            "peer_timeout_s": 0.3,
            "peer_reconnect_s": 0.2,
        }
        monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", yaml.safe_dump(config))
        return ServerClient.load_from_global_config()

    return made


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[int]:
    from nemo_gym.calls import close_client

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        await close_client()
        server.close()


def test_a_server_that_is_not_there_is_waited_for_but_not_for_ever(client_of: Callable[[str, int], Any]) -> None:
    async def run() -> None:
        async with serving(_silent) as port:
            pass  # closed: nobody listens there now
        await client_of("resources_servers", port).post("there", "/verify", json={})

    with pytest.raises(aiohttp.ClientConnectorError):
        asyncio.run(run())


def test_a_server_that_never_answers_is_given_up(client_of: Callable[[str, int], Any]) -> None:
    async def run() -> None:
        async with serving(_silent) as port:
            await client_of("resources_servers", port).post("there", "/verify", json={})

    with pytest.raises(TimeoutError):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "path", "tries"),
    [
        ("resources_servers", "/verify", 3),
        ("responses_api_models", "/v1/responses", 3),
        ("resources_servers", "/pay", 1),
    ],
)
def test_a_call_that_broke_is_made_again_unless_it_may_have_begun_something(
    client_of: Callable[[str, int], Any], kind: str, path: str, tries: int
) -> None:
    heard: list[bytes] = []

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readline())
        writer.close()

    async def run() -> None:
        async with serving(broken) as port:
            await client_of(kind, port).post("there", path, json={})

    with pytest.raises(aiohttp.ServerDisconnectedError):
        asyncio.run(run())
    assert heard == [f"POST {path} HTTP/1.1\r\n".encode()] * tries


def test_an_answer_of_any_status_is_an_answer_and_can_be_raised(client_of: Callable[[str, int], Any]) -> None:
    async def refusing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 No\r\nContent-Length: 5\r\nConnection: close\r\n\r\nlater")
        await writer.drain()
        writer.close()

    async def run() -> None:
        from nemo_gym.server_utils import raise_for_status

        async with serving(refusing) as port:
            answer = await client_of("responses_api_models", port).post("there", "/v1/responses", json={})
            await raise_for_status(answer)

    with pytest.raises(aiohttp.ClientResponseError) as response:
        asyncio.run(run())
    assert response.value.status == 503
    assert response.value.response_content == b"later"  # pyright: ignore[reportAttributeAccessIssue]


def test_an_unknown_server_is_named(client_of: Callable[[str, int], Any]) -> None:
    with pytest.raises(KeyError, match="no server 'elsewhere'"):
        asyncio.run(client_of("resources_servers", 1).post("elsewhere", "/verify"))


def test_outside_a_gym_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(COMPAT))
    from nemo_gym import global_config

    monkeypatch.delenv("NEMO_GYM_CONFIG_DICT", raising=False)
    with pytest.raises(RuntimeError, match="palestra gym run -c FILE"):
        global_config.get_global_config_dict()


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()  # until the caller hangs up
    writer.close()
