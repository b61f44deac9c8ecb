"""OpenEnv's `/mcp`: real MCP, and sessions that outlive a request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from palestra.environments.platform import APPS, make_task
from palestra.environments.platform.api.auth import PlatformAuth
from palestra.environments.platform.api.openenv.sessions import FEW, OpenEnvSessions
from palestra.environments.platform.pool import InstancePool
from palestra.environments.platform.pool_records import PoolLimits
from tests.environments.platform.api.conftest import Platform, started
from tests.environments.platform.api.test_openenv import TASK, alive, connected
from tests.waiting import until

PATH = "/openenv/keys/mcp"


def rpc(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def posted(platform: Platform, method: str, path: str = PATH, **params: Any) -> dict[str, Any]:
    answer = platform.stranger.post(path, json=rpc(method, **params))
    assert answer.status_code == 200, answer.text
    return answer.json()


def called(platform: Platform, session_id: str, tool: str, **arguments: Any) -> Any:
    response = posted(platform, "tools/call", name=tool, arguments=arguments, session_id=session_id)
    return response["result"]["data"] if "result" in response else response["error"]["message"]


def opened(platform: Platform) -> str:
    return posted(platform, "openenv/session/create")["result"]["session_id"]


def test_a_session_keeps_its_world_and_others_have_theirs(platform: Platform):
    before = alive(platform)
    one, other = opened(platform), opened(platform)
    assert called(platform, one, "set", name="zz", value=3) == {"name": "zz", "value": 3}
    assert called(platform, one, "get", name="zz")["value"] == 3
    assert called(platform, other, "get", name="zz")["error"] == "not_found"
    response = posted(platform, "tools/call", name="get", arguments={"name": "zz"})["result"]
    assert (response["isError"], response.keys()) == (True, {"content", "isError"})
    assert alive(platform) == before + 2
    for session_id in (one, other):
        closed = posted(platform, "openenv/session/close", session_id=session_id)["result"]
        assert closed == {"session_id": session_id, "closed": True}
        assert posted(platform, "openenv/session/close", session_id=session_id)["error"]["code"] == -32602
        assert "Unknown session_id" in called(platform, session_id, "list")
    assert alive(platform) == before


def test_a_websocket_joins_a_session_and_leaves_it(platform: Platform):
    session_id = opened(platform)
    value = make_task(TASK).params["value"]
    with connected(platform, f"keys/ws?session_id={session_id}") as player:
        player.reset(task_key=TASK)
        assert called(platform, session_id, "put", value=value) == {"put": value}
        assert player.send("state")["data"]["step_count"] == 1
        assert player.finish()["reward"] == 1.0
        assert "reset for another" in called(platform, session_id, "list")
        with connected(platform, f"keys/ws?session_id={session_id}") as second:
            response = json.loads(second.socket.recv(timeout=30))
            assert (response["data"]["code"], "already" in response["data"]["message"]) == ("SESSION_ERROR", True)
    # Who leaves does so in its own time: until then the place is taken.
    until(lambda: joined(platform, session_id))
    with connected(platform, f"keys/ws?session_id={session_id}") as player:
        assert player.send("state")["data"]["task_key"] == TASK
        response = posted(platform, "openenv/session/close", session_id=session_id)["result"]
        assert response == {"session_id": session_id, "closed": False, "closing": True}
        assert player.reset(task_key=TASK)["done"] is False
    until(lambda: "Unknown" in str(called(platform, session_id, "list")))


def joined(platform: Platform, session_id: str) -> bool:
    with connected(platform, f"keys/ws?session_id={session_id}") as player:
        return player.send("state")["type"] == "state"


def test_nobody_plays_in_a_session_of_another_team_or_app(platform: Platform):
    session_id = opened(platform)
    with httpx.Client(base_url=platform.url, headers={"Authorization": "Bearer another"}) as other:
        for method in ("tools/list", "openenv/session/close"):
            response = other.post(PATH, json=rpc(method, session_id=session_id)).json()
            assert response["error"]["code"] == -32602
    assert posted(platform, "tools/list", "/openenv/mail/mcp", session_id=session_id)["error"]["code"] == -32602
    for path, key in ((f"mail/ws?session_id={session_id}", None), (f"keys/ws?session_id={session_id}", "another")):
        with connected(platform, path, key) as player:
            assert json.loads(player.socket.recv(timeout=30))["data"]["code"] == "SESSION_ERROR"
    assert "result" in posted(platform, "openenv/session/close", session_id=session_id)


def test_mcp_clients_are_given_a_session(platform: Platform):
    before = alive(platform)
    answer = platform.stranger.post(PATH, json=rpc("initialize", protocolVersion="2025-06-18"))
    assert answer.json()["result"]["protocolVersion"] == "2025-06-18"
    headers = {"Mcp-Session-Id": answer.headers["mcp-session-id"]}
    assert alive(platform) == before + 1
    note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    assert platform.stranger.post(PATH, json=note, headers=headers).status_code == 202
    for tool, arguments in (("set", {"name": "zz", "value": 3}), ("get", {"name": "zz"})):
        response = platform.stranger.post(PATH, json=rpc("tools/call", name=tool, arguments=arguments), headers=headers)
        assert response.json()["result"]["content"][0]["text"] == '{"name":"zz","value":3}'
    assert platform.stranger.get(PATH, headers=headers).status_code == 405
    assert platform.stranger.delete(PATH, headers=headers).status_code == 200
    assert alive(platform) == before
    assert platform.stranger.delete(PATH, headers=headers).status_code == 404
    modern = platform.stranger.post(PATH, json=rpc("initialize"), headers={"MCP-Protocol-Version": "2026-07-28"})
    assert (modern.status_code >= 400, "mcp-session-id" in modern.headers, alive(platform)) == (True, False, before)
    assert platform.stranger.post(PATH, json=rpc("tools/list"), headers=headers).status_code == 404


def test_the_official_client_keeps_its_world(platform: Platform):
    mcp = pytest.importorskip("mcp")
    before = alive(platform)

    async def play() -> None:
        async with mcp.Client(f"{platform.url}{PATH}", mode="legacy") as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == [t.name for t in APPS["keys"].tools]
            await client.call_tool("set", {"name": "zz", "value": 3})
            found = await client.call_tool("get", {"name": "zz"})
            assert [block.text for block in found.content] == ['{"name":"zz","value":3}']
        async with mcp.Client(f"{platform.url}{PATH}", mode="2026-07-28") as client:
            assert (await client.call_tool("get", {"name": "zz"})).is_error

    asyncio.run(play())
    assert alive(platform) == before


def test_messages_over_a_websocket(platform: Platform):
    with connected(platform) as player:
        player.reset(task_key=TASK)
        response = player.send("mcp", **rpc("tools/call", name="put", arguments={"value": 4}))
        assert response["type"] == "mcp"
        assert response["data"]["result"]["content"][0]["text"] == '{"put":4}'
        assert player.send("state")["data"]["step_count"] == 1
        own = player.send("mcp", **rpc("openenv/session/create"))["data"]["result"]["session_id"]
        assert player.send("mcp", **rpc("openenv/session/close", session_id=own))["data"]["error"]["code"] == -32600
        for wrong in ({}, {"jsonrpc": "2.0", "method": "openenv/session/create"}):
            assert player.send("mcp", **wrong)["data"]["error"]["code"] == -32600
        assert player.send("mcp", jsonrpc="2.0", method="notifications/x")["data"]["result"] == {}
        assert player.call("list")["observation"]["error"] is None
    with connected(platform, "keys/mcp") as talker:
        talker.socket.send('{"jsonrpc": "2.0", "method": "notifications/initialized"}')  # is not answered
        assert "tools" in json.loads(talker.said(rpc("tools/list")))["result"]
        assert json.loads(talker.said("{"))["error"]["code"] == -32700


@pytest.mark.parametrize(
    "body", [b"{}", b"{", b"[]", b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": 3}']
)
def test_what_is_no_message_is_an_error_in_the_body(platform: Platform, body: bytes):
    """With a 200, as OpenEnv's own server has it."""
    answer = platform.stranger.post(PATH, content=body)
    assert (answer.status_code, "error" in answer.json()) == (200, True)


def test_a_connection_may_think_for_long_and_a_session_alone_may_not():
    now = 1000.0
    with InstancePool(PoolLimits(ttl_s=10), clock=lambda: now) as pool:
        for url in started(pool, PlatformAuth(secret=b"of the tests")):
            platform = Platform(pool, url)
            alone, joined_one = opened(platform), opened(platform)
            with (
                connected(platform) as player,
                connected(platform, f"keys/ws?session_id={joined_one}") as guest,
                connected(platform, "keys/mcp") as talker,
            ):
                assert "tools" in talker.said(rpc("tools/list"))
                assert (player.send("state")["type"], guest.send("state")["type"]) == ("state", "state")
                for _ in range(5):
                    now += 8
                    pool.tick()
                assert "Unknown session_id" in called(platform, alone, "list")
                assert player.call("list")["observation"]["error"] is None
                assert guest.call("list")["observation"]["error"] is None
                assert "result" in json.loads(talker.said(rpc("tools/call", name="list")))
            until(lambda: pool.usage().instances == 1)
            now += 20
            pool.tick()
            assert "Unknown session_id" in called(platform, joined_one, "list")


def test_sessions_that_time_ended_are_forgotten():
    now = 1000.0
    with InstancePool(PoolLimits(ttl_s=10), clock=lambda: now) as pool:
        sessions = OpenEnvSessions(pool)

        async def open_some(count: int) -> None:
            for _ in range(count):
                await sessions.open(APPS["keys"], "a")

        asyncio.run(open_some(FEW - 1))
        now += 20
        pool.tick()
        assert len(sessions) == FEW - 1
        asyncio.run(open_some(1))
        assert len(sessions) == 1
        sessions.close_all()
        assert (len(sessions), pool.usage().instances) == (0, 0)
