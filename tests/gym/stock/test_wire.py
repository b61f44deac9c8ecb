"""What a server of NeMo Gym's says over HTTP under our stand-in."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from yarl import URL

from tests.gym.stock.conftest import StockGym

COOKIE = "Tally___tally"
TOKEN = "X-NeMo-Gym-Session-Token"
RESPONSE = {
    "id": "r",
    "created_at": 1,
    "model": "m",
    "object": "response",
    "output": [],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}


class Said:
    def __init__(self, status: int, body: Any, cookies: dict[str, str]) -> None:
        self.status, self.body, self.cookies = status, body, cookies


@pytest.fixture
def ask(gym: StockGym):
    def request(path: str, body: Any = None, *, method: str = "POST", cookies: Any = None, **headers: str) -> Said:
        async def call() -> Said:
            jar = aiohttp.DummyCookieJar()
            async with aiohttp.ClientSession(cookie_jar=jar) as session:
                url = URL(gym.url_of("tally") + path)
                async with session.request(method, url, json=body, cookies=cookies, headers=headers) as answer:
                    found = {name: one.value for name, one in answer.cookies.items()}
                    return Said(answer.status, await answer.json(content_type=None), found)

        return gym.run(call())

    return request


def test_a_session_is_a_signed_cookie(ask) -> None:
    seeded = ask("/seed_session", {})
    assert list(seeded.cookies) == [COOKIE]
    assert ask("/add", {"amount": 2}, cookies=seeded.cookies).body == {"total": 12}
    assert ask("/add", {"amount": 2}, cookies=seeded.cookies).body == {"total": 14}
    forged = {COOKIE: seeded.cookies[COOKIE][:-3] + "xxx"}
    assert ask("/add", {"amount": 2}, cookies=forged).status == 409


def test_errors_are_told_as_nemo_gym_tells_them(ask) -> None:
    cookies = ask("/seed_session", {}).cookies
    broken = ask("/add", {"amount": 666}, cookies=cookies)
    assert (broken.status, broken.body) == (500, "RuntimeError('the number of the beast')")
    assert list(broken.cookies) == [COOKIE]
    invalid = ask("/add", {"amount": "many"}, cookies=cookies)
    assert invalid.status == 422
    assert invalid.body["detail"][0]["loc"] == ["body", "amount"]
    assert list(invalid.cookies) == [COOKIE]
    assert ask("/nothing", {}).status == 404


def test_what_every_resources_server_answers(ask) -> None:
    assert ask("/", method="GET").body == ask("/readyz", method="GET").body == {"status": "ok"}
    close = {"resources_session_id": "s", "episode_id": {"rollout_id": "3-1"}}
    assert ask("/close_session", close).body == {"resources_session_id": "s"}
    assert ask("/reverify_mode", method="GET").body == "unsupported"
    assert ask("/ng-rollout/3-1/seed_session", {}).status == 200
    assert ask("/aggregate_metrics", {"verify_responses": []}).body == {
        "group_level_metrics": [],
        "agent_metrics": {},
        "key_metrics": {},
    }


def test_request_parameters_nobody_knows_are_refused(ask) -> None:
    row = {"responses_create_params": {"input": "hi", "temprature": 1}, "response": RESPONSE, "expected": 1}
    refused = ask("/verify", row)
    assert refused.status == 422
    assert refused.body["detail"][0]["loc"][-1] == "temprature"


def test_token_ids_pass_through_whole_or_not_at_all(ask) -> None:
    ids = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
    message = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "x", "annotations": []}],
    }
    hosted = {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search"}}
    items = [hosted, message, {**message, **ids}]
    row = {"responses_create_params": {"input": "hi"}, "response": {**RESPONSE, "output": items}, "expected": 1}
    output = ask("/verify", row).body["response"]["output"]
    assert output[0] == hosted
    assert "generation_token_ids" not in output[1]
    assert {name: output[2][name] for name in ids} == ids
    del items[2]["prompt_token_ids"]
    assert ask("/verify", row).status == 422


def test_tools_over_mcp_are_the_same_tools_in_the_same_session(ask) -> None:
    def called(method: str, params: dict[str, Any], **headers: str) -> Any:
        return ask("/mcp", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}, **headers).body

    seeded = ask("/seed_session", {})
    invited = seeded.body["mcp"]
    assert (invited["server_name"], invited["url_path"], invited["transport"]) == ("tally", "/mcp", "http")
    version = called("initialize", {"protocolVersion": "2025-03-26"})["result"]["protocolVersion"]
    assert version == "2025-03-26"
    (tool,) = called("tools/list", {}, **invited["headers"])["result"]["tools"]
    assert (tool["name"], tool["description"]) == ("add", "Add an amount to the sum.")
    assert tool["inputSchema"]["required"] == ["amount"]
    call = {"name": "add", "arguments": {"amount": 7}}
    assert called("tools/call", call, **invited["headers"])["result"]["structuredContent"] == {"total": 17}
    assert called("tools/call", call)["result"]["isError"]
    assert called("tools/call", call, **{TOKEN: "made-up"})["result"]["isError"]
    bad = called("tools/call", {"name": "add", "arguments": {}}, **invited["headers"])["result"]
    assert bad["content"][0]["text"].startswith("HTTP 422 from POST /add")
    assert called("resources/list", {})["error"]["code"] == -32601

    item = {"type": "function_call", "call_id": "c", "name": "mcp__tally__add", "arguments": "{}"}
    row = {"responses_create_params": {"input": "hi"}, "response": {**RESPONSE, "output": [item]}, "expected": 17}
    judged = ask("/verify", row, cookies=seeded.cookies).body
    assert (judged["reward"], judged["tools"]) == (1.0, ["add"])
    assert judged["response"]["output"][0]["name"] == "mcp__tally__add"
