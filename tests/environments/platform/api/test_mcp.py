"""MCP on the wire: both eras, and everything a client may get wrong."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from palestra.environments.platform import APPS, Instance
from palestra.environments.platform.seeds import seed_named
from tests.environments.platform.api.conftest import Platform

MODERN = "2026-07-28"
META = "io.modelcontextprotocol"
CALLS = [
    ("list", {}),
    ("set", {"name": "a", "value": 3}),
    ("get", {"name": "nowhere"}),
    ("put", {"value": "three"}),
    ("put", {"valeu": 3}),
    ("put", {"value": 7}),
    ("launch", {}),
    ("set", {"name": 'ünï\n"c\\ode', "value": -(2**63)}),
    ("put", [1]),
    ("list", {}),
]


@pytest.fixture(scope="module")
def instance_id(platform: Platform) -> str:
    return platform.make()["instance_id"]


def modern(method: str, version: str = MODERN, **params: Any) -> tuple[dict[str, Any], dict[str, str]]:
    meta = {f"{META}/protocolVersion": version, f"{META}/clientCapabilities": {}}
    headers = {"MCP-Protocol-Version": version, "Mcp-Method": method}
    if "name" in params:
        headers["Mcp-Name"] = params["name"]
    return {"jsonrpc": "2.0", "id": "x", "method": method, "params": {"_meta": meta, **params}}, headers


def posted(platform: Platform, instance_id: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    answer = platform.stranger.post(f"/i/{instance_id}/mcp", json=body, headers=headers)
    return answer.status_code, answer.json() if answer.content else None


def test_observations_are_the_same_bytes_in_process_and_on_every_path_and_era(platform: Platform):
    alone = Instance(seed_named(APPS["keys"], "small-5"))
    ids = [platform.make(data_key="small-5")["instance_id"] for _ in range(3)]
    for tool, arguments in CALLS:
        expected = alone.call(tool, arguments)
        body, headers = modern("tools/call", name=tool, arguments=arguments)
        response = [
            platform.call(ids[0], tool, arguments),
            platform.call(ids[1], tool, arguments, "api/v1/mcp"),
            posted(platform, ids[2], body, headers)[1]["result"],
        ]
        for one in response:
            assert one["content"] == [{"type": "text", "text": expected.text}]
            assert one["isError"] is expected.is_error
        assert response[2]["resultType"] == "complete"
    for instance_id in ids:
        with platform.pool.use(instance_id) as instance:
            assert instance.state_hash() == alone.state_hash()
        rows = platform.runner(instance_id, "resources/sqlite/current/query", {"query": "SELECT * FROM items"}).json()
        assert rows["rows"] == [list(row) for row in alone.connection.execute("SELECT * FROM items")]


@pytest.mark.parametrize(
    ("asked", "told"),
    [("2024-11-05", "2024-11-05"), ("2025-11-25", "2025-11-25"), ("1999-01-01", "2025-11-25"), (None, "2025-11-25")],
)
def test_a_handshake_settles_on_a_version(platform: Platform, instance_id: str, asked: str | None, told: str):
    answer = platform.mcp(instance_id, "initialize", {"protocolVersion": asked, "capabilities": {}})
    result = answer.json()["result"]
    assert result["protocolVersion"] == told
    assert result["capabilities"] == {"tools": {"listChanged": False}}
    assert "mcp-session-id" not in answer.headers


def test_the_bare_call_of_the_fleet_sdk_gets_the_tools(platform: Platform, instance_id: str):
    body = {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 2}
    answer = platform.stranger.post(f"/i/{instance_id}/mcp", json=body, headers={"Accept": "*/*"})
    assert answer.headers["content-type"] == "application/json"
    assert [tool["name"] for tool in answer.json()["result"]["tools"]] == [tool.name for tool in APPS["keys"].tools]


def test_notifications_are_taken_and_not_answered(platform: Platform, instance_id: str):
    assert posted(platform, instance_id, {"jsonrpc": "2.0", "method": "notifications/initialized"}) == (202, None)


def test_discovery_names_all_versions(platform: Platform, instance_id: str):
    status, response = posted(platform, instance_id, *modern("server/discover"))
    assert status == 200
    result = response["result"]
    assert result["supportedVersions"][0] == MODERN
    assert result["resultType"] == "complete"
    assert result["_meta"][f"{META}/serverInfo"]["name"] == "palestra-keys"


def test_modern_lists_say_how_long_they_hold(platform: Platform, instance_id: str):
    result = posted(platform, instance_id, *modern("tools/list"))[1]["result"]
    assert (result["resultType"], result["cacheScope"]) == ("complete", "public")
    assert result["ttlMs"] > 0


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, -32700),
        (b"\xff\xfe", 400, -32700),
        (b"[" * 5000, 400, -32700),
        (b"[]", 400, -32600),
        (b"3", 400, -32600),
        (b'{"id": 1, "method": "ping"}', 400, -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "result": {}}', 400, -32600),
        (b'{"jsonrpc": "2.0", "id": null, "method": "ping"}', 400, -32600),
        (b'{"jsonrpc": "2.0", "id": true, "method": "ping"}', 400, -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": [1]}', 400, -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "resources/list"}', 200, -32601),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "server/discover"}', 200, -32601),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {}}', 400, -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": 3}}', 400, -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"cursor": "9"}}', 400, -32602),
    ],
)
def test_what_is_no_request_is_told_so(platform: Platform, instance_id: str, body: bytes, status: int, code: int):
    answer = platform.stranger.post(f"/i/{instance_id}/mcp", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_ping_is_answered(platform: Platform, instance_id: str):
    assert platform.mcp(instance_id, "ping").json() == {"jsonrpc": "2.0", "id": 1, "result": {}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"MCP-Protocol-Version": "2025-11-25x"},
        {"Mcp-Method": "ping"},
        {"Mcp-Name": "get"},
        {"Mcp-Name": "=?base64?!?="},
    ],
)
def test_headers_that_disagree_with_the_body_are_refused(platform: Platform, instance_id: str, wrong: dict[str, str]):
    body, headers = modern("tools/call", name="put", arguments={"value": 1})
    status, response = posted(platform, instance_id, body, headers | wrong)
    assert (status, response["error"]["code"], response["id"]) == (400, -32020, "x")
    with platform.pool.use(instance_id) as instance:
        assert not instance.changes()


def test_a_header_that_comes_twice_is_refused(platform: Platform, instance_id: str):
    body, headers = modern("tools/call", name="put", arguments={"value": 1})
    twice = [*headers.items(), ("Mcp-Name", "get")]
    answer = platform.stranger.post(f"/i/{instance_id}/mcp", json=body, headers=twice)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, -32020)


def test_spaces_around_a_header_mean_nothing(platform: Platform, instance_id: str):
    body, headers = modern("tools/call", name="list", arguments={})
    line = http.client.HTTPConnection(platform.url.removeprefix("http://"), timeout=30)  # httpx sends no such header
    line.request("POST", f"/i/{instance_id}/mcp", json.dumps(body), headers | {"Mcp-Name": "  list\t "})
    assert json.loads(line.getresponse().read())["result"]["isError"] is False
    line.close()


def test_a_name_in_base64_is_read(platform: Platform, instance_id: str):
    body, headers = modern("tools/call", name="list", arguments={})
    assert posted(platform, instance_id, body, headers | {"Mcp-Name": "=?base64?bGlzdA==?="})[0] == 200


def test_an_unknown_version_is_told_the_known_ones(platform: Platform, instance_id: str):
    status, response = posted(platform, instance_id, *modern("tools/list", "2031-01-01"))
    assert (status, response["error"]["code"]) == (400, -32022)
    assert response["error"]["data"]["requested"] == "2031-01-01"
    assert {MODERN, "2025-11-25"} <= set(response["error"]["data"]["supported"])
    bare = platform.mcp(instance_id, "tools/list", **{"MCP-Protocol-Version": "1.0"})
    assert (bare.status_code, bare.json()["error"]["code"]) == (400, -32022)


def test_a_modern_request_without_its_envelope_is_refused(platform: Platform, instance_id: str):
    body, headers = modern("tools/list")
    del body["params"]["_meta"][f"{META}/clientCapabilities"]
    assert posted(platform, instance_id, body, headers)[1]["error"]["code"] == -32602
    del body["params"]["_meta"]
    assert posted(platform, instance_id, body, headers)[1]["error"]["code"] == -32602


@pytest.mark.parametrize("method", ["initialize", "ping", "subscriptions/listen"])
def test_what_the_modern_era_does_not_have_is_not_found(platform: Platform, instance_id: str, method: str):
    status, response = posted(platform, instance_id, *modern(method))
    assert (status, response["error"]["code"]) == (404, -32601)


def test_the_app_for_the_conformance_suite_is_there_for_who_names_it(platform: Platform):
    assert "conf" not in {env["env_key"] for env in platform.http.get("/v1/env").json()}
    made = platform.make(env_key="conf")["instance_id"]
    response = [platform.call(made, name, {}) for name in ("test_simple_text", "test_error_handling")]
    assert [(one["isError"], "for testing" in one["content"][0]["text"]) for one in response] == [
        (False, True),
        (True, True),
    ]
    schemas = [tool["inputSchema"] for tool in platform.mcp(made, "tools/list").json()["result"]["tools"]]
    assert {"$defs", "allOf", "if", "then", "else"} <= schemas[-1].keys()
    contact = platform.call(made, "json_schema_2020_12_tool", {"name": "Ada", "email": "ada@x.org"})
    assert '"email":"ada@x.org"' in contact["content"][0]["text"]


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
def test_only_posts_are_taken(platform: Platform, instance_id: str, method: str):
    answer = platform.stranger.request(method, f"/i/{instance_id}/mcp")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_an_instance_that_is_gone_says_so(platform: Platform):
    answer = platform.mcp("0" * 32, "tools/list")
    assert answer.status_code == 410
    assert "make another" in answer.json()["error"]["message"]


def test_a_websocket_is_refused(platform: Platform, instance_id: str):
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    answer = platform.stranger.get(
        f"/i/{instance_id}/mcp", headers=upgrade | {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    )
    assert answer.status_code in (403, 405)  # 405 where uvicorn knows no WebSockets


def test_pages_of_others_are_not_served(platform: Platform, instance_id: str):
    assert platform.mcp(instance_id, "tools/list", Origin="http://evil.example").status_code == 403
    assert platform.mcp(instance_id, "tools/list", Host="evil.example").status_code == 403
    assert platform.mcp(instance_id, "tools/list", Origin=platform.url).status_code == 200
