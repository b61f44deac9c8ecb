"""Tools over MCP: the official client, in the session of a rollout."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from palestra.gym.testing import model_response
from tests.gym.servers.conftest import Gym

HEADER = "X-NeMo-Gym-Session-Token"


def seeded(gym: Gym, **fields: Any) -> tuple[dict[str, str], dict[str, Any]]:
    answer = gym.post("shown", "/seed_session", fields)
    return answer.cookies, answer.value()["mcp"]


def test_an_mcp_client_plays_in_the_session_it_was_given(gym: Gym) -> None:
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    cookies, invitation = seeded(gym, initial_count=3)
    assert invitation["url_path"] == "/mcp"
    assert invitation["server_name"] == "shown"

    async def played() -> tuple[list[str], Any, Any]:
        async with (
            httpx2.AsyncClient(headers=invitation["headers"]) as client,
            Client(streamable_http_client(f"{gym.url('shown')}/mcp", http_client=client)) as session,
        ):
            names = [one.name for one in (await session.list_tools()).tools]
            good = await session.call_tool("add", {"count": 4})
            bad = await session.call_tool("add", {"count": "many"})
            return names, good, bad

    names, good, bad = gym.run(played())
    assert {"add", "show", "divide"} <= set(names)
    assert (json.loads(good.content[0].text), good.is_error) == ({"count": 7}, False)
    assert bad.is_error
    assert gym.post("shown", "/show", {}, cookies=cookies).raw() == b"it is 7"


def rpc(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


@pytest.mark.parametrize("token", ["", "x.y", "5c0f6f6e-0000-4000-8000-000000000000.AAAA"])
def test_without_the_token_there_is_no_session(gym: Gym, token: str) -> None:
    async def sent() -> httpx2.Response:
        async with httpx2.AsyncClient() as client:
            return await client.post(f"{gym.url('shown')}/mcp", json=rpc("tools/list"), headers={HEADER: token})

    response = gym.run(sent())
    assert response.status_code == 401
    assert "/seed_session returns it" in response.json()["detail"]


def test_a_message_with_a_wrong_envelope_calls_nothing(gym: Gym) -> None:
    cookies, invitation = seeded(gym, initial_count=3)
    modern = {**invitation["headers"], "mcp-protocol-version": "2026-07-28", "mcp-method": "tools/list"}

    async def sent() -> httpx2.Response:
        async with httpx2.AsyncClient() as client:
            call = rpc("tools/call", name="add", arguments={"count": 1})
            return await client.post(f"{gym.url('shown')}/mcp", json=call, headers=modern)

    assert gym.run(sent()).status_code == 400
    assert gym.post("shown", "/show", {}, cookies=cookies).raw() == b"it is 3"


def test_servers_that_do_not_offer_it_have_none(gym: Gym) -> None:
    assert gym.post("counter", "/mcp", rpc("tools/list")).status == 404
    assert gym.post("counter", "/seed_session", {}).value() == {}


def test_names_with_mcps_prefix_are_bare_for_the_verdict_only() -> None:
    from palestra.gym.servers.resources import ResourcesServer
    from palestra.gym.testing import opened

    class Names(ResourcesServer):
        async def verify(self, response: dict[str, Any]) -> Any:
            return {"reward": 0, "seen": [one.get("name") for one in response["output"]]}

    made = model_response("", ("mcp__tested__add", {}), ("mcp__other__add", {}), ("add", {}))
    with opened(Names, expose_tools_over_mcp=True) as names:
        found = names.caller().verify(made)
    assert found["seen"] == ["add", "mcp__other__add", "add", None]
    assert found["response"]["output"][0]["name"] == "mcp__tested__add"
