"""Streaming harnesses, Anthropic's Messages and endpoints that speak Responses: other words for the same calls."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.gym.models.conversions import response
from palestra.gym.models.messages import as_message, as_responses
from palestra.gym.models.requests import checked
from tests.gym.models.scripted import OPENAI, always, asked, completion
from tests.gym.models.test_conversions import CALL, CHAT_CALL, OUTPUT, RESPONSES, SAID, THOUGHT, TOOL, USER, sent, told

Json = dict[str, Any]
MESSAGES = "/v1/messages"


# Streaming harnesses


def test_a_streaming_harness_loses_fields_and_tools_that_nobody_knows_but_not_its_turn() -> None:
    grouped = {"type": "namespace", "name": "shop", "tools": [{"name": "look", "parameters": {}}]}
    body = {
        "stream": True,
        "client_metadata": {"a": 1},
        "prompt_cache_key": "x",
        "tools": [grouped, {"type": "web_search"}],
        "input": [
            USER,
            {"type": "ghost"},
            {**CALL, "namespace": "shop"},
            OUTPUT,
            {"type": "additional_tools", "tools": [TOOL]},
        ],
    }
    answer = completion(None, tool_calls=[{**CHAT_CALL, "function": {"name": "shop__look", "arguments": "{}"}}])
    found, endpoint = asked(always(answer), RESPONSES, body)
    request = endpoint.bodies[0]
    assert [tool["function"]["name"] for tool in request["tools"]] == ["shop__look", "look"]
    assert request["messages"][1]["tool_calls"][0]["function"]["name"] == "shop__look"
    assert found.content_type == "text/event-stream"
    assert b'"namespace":"shop"' in found.body
    assert b'"name":"look"' in found.body
    assert b"event: response.completed" in found.body


def test_a_failure_within_a_stream_is_an_event_of_it() -> None:
    found, _ = asked(always({}, 400), RESPONSES, {"input": "a", "stream": True})
    assert (found.status, found.content_type) == (200, "text/event-stream")
    assert b"event: response.failed" in found.body
    assert b"answered 400" in found.body


# Messages


def test_messages_of_anthropic_become_items_in_their_order() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    params, beside = as_responses(
        {
            "model": "claude",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
            "stop_sequences": ["x"],
            "top_k": 4,
            "tools": [{"name": "look"}],
            "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "See"}, image]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "text", "text": "Yes."},
                        {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": 1}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "a cup"}]},
            ],
        }
    )
    assert [item["type"] for item in params["input"]] == [
        "message",
        "reasoning",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert params["input"][0]["content"][1]["image_url"] == "data:image/png;base64,AA"
    assert params["input"][3]["arguments"] == '{"a":1}'
    assert (params["instructions"], params["max_output_tokens"]) == ("A\nB", 5)
    assert params["tool_choice"] == {"type": "function", "name": "look"}
    assert params["parallel_tool_calls"] is False
    assert beside == {"stop": ["x"], "top_k": 4}
    checked(params)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": ["a"]},
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        {"messages": [USER], "system": [{"type": "image"}]},
        {"messages": [USER], "tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"messages": [USER], "tool_choice": {"type": "maybe"}},
    ],
)
def test_messages_without_a_form_here_are_refused(body: Json) -> None:
    assert asked(always(completion()), MESSAGES, {"model": "m", "max_tokens": 3, **body})[0].status == 422


def test_stop_sequences_reach_the_endpoint() -> None:
    body = {"model": "m", "max_tokens": 3, "messages": [USER], "stop_sequences": ["x"]}
    assert sent(body, MESSAGES)["stop"] == ["x"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (completion("Yes."), "end_turn"),
        (completion(None, tool_calls=[CHAT_CALL]), "tool_use"),
        (completion("Y", finish_reason="length"), "max_tokens"),
        (completion("Y", finish_reason="content_filter"), "refusal"),
    ],
)
def test_why_it_stopped_is_told_in_anthropics_words(answer: Json, reason: str) -> None:
    found = as_message(response({"input": "a"}, answer, model="m", has_thoughts=True), model="claude")
    assert (found["stop_reason"], found["model"]) == (reason, "claude")
    assert found["usage"] == {"input_tokens": 5, "output_tokens": 2}


def test_arguments_that_are_no_object_are_shown_raw() -> None:
    broken = {**CHAT_CALL, "function": {"name": "look", "arguments": "{oh"}}
    found = told(completion(None, tool_calls=[broken]), {"model": "m", "messages": [USER]}, MESSAGES)
    assert found["content"] == [{"type": "tool_use", "id": "c1", "name": "look", "input": {"_raw": "{oh"}}]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_openai_model_streams_whatever_items_its_endpoint_has(path: str) -> None:
    output = [{"type": "reasoning"}, {"type": "web_search_call"}, {"type": "message"}, {"type": "function_call"}]
    body: Json = {"input": "Hi"} if path == RESPONSES else {"messages": [USER], "max_tokens": 3}
    answer = {"object": "response", "model": "m", "output": output}
    found, _ = asked(always(answer), path, {**body, "stream": True}, of=OPENAI)
    assert (found.status, found.content_type) == (200, "text/event-stream")
    assert found.body.count(b"_stop\n" if path == MESSAGES else b"output_item.done\n") == (2 if path == MESSAGES else 4)


def test_openai_model_drops_reasoning_where_the_endpoint_cannot_read_its_own() -> None:
    answer = {"object": "response", "model": "m", "output": []}
    body = {"input": [USER, THOUGHT, SAID], "temperature": None}
    found = sent(body, answer=answer, of=OPENAI, drop_input_reasoning_items="true", extra_body={"seed": 1})
    assert found == {"seed": 1, "model": "ephebe", "input": [USER, SAID]}
