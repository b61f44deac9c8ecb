"""Whatever is sent to OpenEnv's paths, the answer is one that was meant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.environments.platform.api.conftest import Platform
from tests.environments.platform.api.test_any_body import FEW, MESSAGES, VALUES, content
from tests.environments.platform.api.test_openenv import Player, connected

ACTIONS = st.fixed_dictionaries(
    {"type": st.sampled_from(["list_tools", "call_tool", "finish"]) | VALUES},
    optional={
        "tool_name": st.sampled_from(["put", "set", "list", "submit_final_answer"]) | VALUES,
        "arguments": st.dictionaries(st.sampled_from(["name", "value", "answer"]), VALUES) | VALUES,
        "answer": VALUES,
        "metadata": VALUES,
    },
)
RESETS = st.dictionaries(
    st.sampled_from(["seed", "episode_id", "task_key", "split", "index", "x"]),
    VALUES | st.sampled_from(["train", "eval", "keys-put_number-0b-17", "keys-largest-2-3"]),
)
TASKS = st.dictionaries(st.sampled_from(["split", "index", "start", "stop"]), VALUES | st.just("train"))
FRAMES = st.fixed_dictionaries(
    {"type": st.sampled_from(["reset", "step", "state", "mcp", "x"]) | VALUES},
    optional={"data": ACTIONS | RESETS | MESSAGES | VALUES},
)
CODES = {"INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR", "EXECUTION_ERROR"}


@pytest.fixture(scope="module")
def player(platform: Platform) -> Iterator[Player]:
    with connected(platform) as found:
        yield found


@FEW
@given(message=FRAMES | VALUES)
def test_any_frame(player: Player, message: Any):
    """On one connection: nothing ends it but its end."""
    if isinstance(message, dict) and message.get("type") == "close":
        return
    response = json.loads(player.said(content(message)))
    assert response["type"] in {"observation", "state", "mcp", "error"}
    if response["type"] == "error":
        assert response["data"]["code"] in CODES
        assert "the platform's log" not in response["data"]["message"]
    if response["type"] == "mcp":
        assert response["data"].get("error", {}).get("code") != -32603


@FEW
@given(
    path=st.sampled_from(["reset", "step", "keys/tasks", "keys/num_tasks", "keys/task", "keys/task_range"]),
    data=st.data(),
)
def test_any_request(platform: Platform, path: str, data: st.DataObject):
    kind = {"reset": RESETS, "step": st.fixed_dictionaries({"action": ACTIONS}, optional={"timeout_s": VALUES})}
    body = data.draw(kind.get(path, TASKS) | VALUES)
    answer = platform.stranger.post(f"/openenv/keys/{path}", content=content(body))
    assert answer.status_code in {200, 400, 422}
    assert answer.status_code == 200 or answer.json()["detail"]


@FEW
@given(message=MESSAGES, session_id=VALUES)
def test_any_message(platform: Platform, message: Any, session_id: Any):
    if isinstance(message.get("params"), dict) and session_id is not None:
        message["params"]["session_id"] = session_id
    answer = platform.stranger.post("/openenv/keys/mcp", content=content(message))
    assert answer.status_code in {200, 202, 400, 404}
    if answer.status_code != 202:
        assert ("result" in answer.json()) != ("error" in answer.json())
        assert answer.json().get("error", {}).get("code") != -32603
    if "mcp-session-id" in answer.headers:
        platform.stranger.delete("/openenv/keys/mcp", headers={"Mcp-Session-Id": answer.headers["mcp-session-id"]})
