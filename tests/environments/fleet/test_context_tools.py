"""Tools for the model's own context: the task stays, the rest can be dropped and found again."""

from __future__ import annotations

import json
from typing import Any

from palestra.environments.fleet import FleetTaskEnv
from palestra.environments.platform import make_task
from tests.environments.fleet.conftest import PUT, an_env, call, put_call


def begun(**extras: Any) -> FleetTaskEnv:
    env = an_env(config={"enable_context_tools": True}, **{"max_turns": 50, **extras})
    env.init([])
    return env


def told(env: FleetTaskEnv, action: str) -> Any:
    text = env.step(action)["observations"][0]["content"]
    return json.loads(text.removeprefix("Tool result:\n")) if text.startswith("Tool result:\n{") else text


def test_old_turns_are_dropped_and_still_found():
    env = begun()
    assert [tool["function"]["name"] for tool in env.tools][-5:] == [
        "check_context",
        "manage_context",
        "search_history",
        "search_tool_output",
        "view_tool_output",
    ]
    for word in ("apple", "pear", "plum"):
        env.step(f"I think of {word}.")
    assert told(env, call("check_context")) == {"visible_turns": 4, "total_turns": 4, "dropped_turns": 0}
    step = env.step(call("manage_context", keep_recent_turns=1))
    history = step["metadata"]["modified_chat_history"]
    assert history == env.chat_history
    assert [message["role"] for message in history] == ["system", "user", "user", "assistant", "user"]
    assert history[1]["content"] == make_task(PUT).prompt
    assert told(env, call("check_context"))["dropped_turns"] == 4
    found = told(env, call("search_history", pattern="APPLE|plum"))
    assert [match["snippet"] for match in found["matches"]] == ["I think of apple.", "I think of plum."]
    assert (env.tool_calls, env.turns) == (0, 7)
    assert env.step(put_call() + "<done>")["reward"] == 1.0
    env.close()


def test_long_outputs_are_cut_and_can_be_read_in_pages():
    env = begun(max_output_chars=60)
    for value in range(5):
        env.step(call("set", name=f"item{value}", value=value))
    text = env.step(call("list"))["observations"][0]["content"]
    assert "characters" in text
    assert "[Output cut: 60 of" in text
    assert "item4" not in text.partition("[Output cut")[0]
    found = told(env, call("search_tool_output", pattern="item4"))
    assert found["total"] == 1
    page = env.step(call("view_tool_output", page=1, page_size=2))["observations"][0]["content"]
    assert page.startswith("Tool result:\nPage 1 of ")
    env.close()


def test_wrong_arguments_are_answered():
    env = begun()
    for action, words in (
        (call("manage_context"), "takes keep_recent_turns"),
        (call("manage_context", keep_recent_turns=0), "from 1"),
        (call("manage_context", keep_recent_turns="all"), "from 1"),
        (call("search_history", pattern=""), "text to look for"),
        (call("search_history", pattern="(a+)+$"), '"total": 0'),  # no regular expression
        (call("view_tool_output", page=1), "no output was cut"),
    ):
        assert words in env.step(action)["observations"][0]["content"]
    env.close()


def test_without_them_they_are_unknown_tools():
    env = an_env(max_turns=9)
    env.init([])
    assert "unknown_tool" in env.step(call("check_context"))["observations"][0]["content"]
    env.close()
