"""Responses as chats and back: what an endpoint is sent, and what a caller is told of its answer."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.config.bundled import bundled_model
from palestra.gym.models.conversions import chat_request, output_items
from palestra.gym.models.requests import checked
from palestra.gym.models.tokens import CallSeeds
from tests.gym.models.scripted import always, asked, completion

Json = dict[str, Any]
RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
IDS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
THOUGHT = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "hm"}]}
SAID = {
    "type": "message",
    "id": "m",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "a cup"}
TOOL = {"type": "function", "name": "look", "description": None, "parameters": {"type": "object"}, "strict": True}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"arguments": "{}", "name": "look"}}


def sent(body: Json, path: str = RESPONSES, answer: Any = None, **settings: Any) -> Json:
    """What the endpoint gets for it."""
    response, endpoint = asked(always(answer or completion()), path, body, **settings)
    assert response.status == 200, response.body
    return endpoint.bodies[0]


def told(answer: Json, body: Json | None = None, path: str = RESPONSES, **settings: Any) -> Json:
    """What the caller gets for the endpoint's answer."""
    found, _ = asked(always(answer), path, body or {"input": "Hi"}, **settings)
    assert found.status == 200, found.body
    return found.body


def test_a_request_may_name_the_weights_that_are_to_answer_it() -> None:
    body = {"input": "Hi", "model": "gpt-4o", "metadata": {"policy_model_name": "session-7"}}
    found, endpoint = asked(always(completion()), RESPONSES, body)
    assert (endpoint.bodies[0]["model"], found.body["model"]) == ("session-7", "session-7")
    found, endpoint = asked(always(completion()), RESPONSES, {**body, "metadata": {"policy_model_name": ""}})
    assert (endpoint.bodies[0]["model"], found.body["model"]) == ("ephebe", "ephebe")


def test_each_call_of_a_rollout_gets_a_seed_of_its_own() -> None:
    def seeds(*rollouts: str) -> list[int]:
        made = CallSeeds(most=2)
        return [made.next(rollout, [USER]) for rollout in rollouts]

    first = seeds("7", "7", "8", "7")
    assert len(set(first)) == 4
    assert first == seeds("7", "7", "8", "7")
    assert all(0 <= one < 1 << 63 for one in first)
    assert seeds("7", "8", "9", "7")[3] == first[0], "the oldest is forgotten"
    given = {"input": [USER], "metadata": {"rollout_seed": "7", "extra_body": '{"seed": 4}'}}
    assert sent(given)["seed"] == first[0]


def messages_of(items: list[Json], *, with_ids: bool = False, **more: Any) -> list[Json]:
    return chat_request(checked({"input": items, **more}), with_ids=with_ids)["messages"]


def test_what_the_assistant_does_between_two_others_is_one_message() -> None:
    assert messages_of([USER, THOUGHT, SAID, CALL, OUTPUT, SAID]) == [
        USER,
        {"role": "assistant", "content": "<think>hm</think>Yes.", "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "a cup"},
        {"role": "assistant", "content": "Yes."},
    ]
    assert messages_of([USER, CALL])[1] == {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}


def test_text_alone_is_a_user_message_and_parts_become_chat_parts() -> None:
    assert chat_request({"input": "Hi"}, with_ids=False)["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    ]
    parts = [
        {"type": "input_text", "text": "See"},
        {"type": "input_image", "image_url": "data:x"},
        {"type": "input_video", "video_url": "http://v"},
    ]
    assert messages_of([{"role": "user", "content": parts}])[0]["content"] == [
        {"type": "text", "text": "See"},
        {"type": "image_url", "image_url": {"url": "data:x", "detail": "auto"}},
        {"type": "video_url", "video_url": {"url": "http://v"}},
    ]
    listed = {**OUTPUT, "output": [{"type": "input_text", "text": "a cup"}]}
    assert messages_of([listed])[0]["content"] == [{"type": "text", "text": "a cup"}]


def test_instructions_swallow_the_system_messages_that_come_first() -> None:
    system, developer = {"role": "system", "content": "A"}, {"role": "developer", "content": "B"}
    later = {"role": "system", "content": "C"}
    assert messages_of([system, developer, USER, later], instructions="I") == [
        {"role": "system", "content": "I\n\nA\n\nB"},
        USER,
        later,
    ]


def test_ids_travel_on_the_last_message_that_has_them_and_only_if_wanted() -> None:
    later = {"prompt_token_ids": [1, 2, 3, 4], "generation_token_ids": [5], "generation_log_probs": [-1.0]}
    items = [USER, {**CALL, **IDS}, OUTPUT, {**SAID, **later, "routed_experts": "nrlre1:x"}, USER]
    found = messages_of(items, with_ids=True)
    assert "prompt_token_ids" not in found[1]
    assert found[3] == {"role": "assistant", "content": "Yes.", **later, "routed_experts": "nrlre1:x"}
    assert "prompt_token_ids" not in str(messages_of(items))
    assert "prompt_token_ids" not in messages_of([USER, {**SAID, **IDS}, USER, SAID], with_ids=True)[3]


def test_fields_have_their_chat_names() -> None:
    body = sent(
        {
            "input": [USER],
            "max_output_tokens": 9,
            "reasoning": {"effort": "low"},
            "temperature": 0.5,
            "top_p": None,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "name": "look"},
            "parallel_tool_calls": False,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}},
            "metadata": {"extra_body": '{"seed": 4, "temperature": 9}', "chat_template_kwargs": '{"a": 2}'},
        },
        chat_template_kwargs={"a": 1, "b": 1},
        extra_body={"top_k": 3, "seed": 1},
        sampling_overrides={"top_p": 0.9},
    )
    metadata = body.pop("metadata")
    assert "extra_body" in metadata
    assert body == {
        "model": "ephebe",
        "messages": [USER],
        "max_tokens": 9,
        "reasoning_effort": "low",
        "temperature": 0.5,
        "top_p": 0.9,
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}},
        "chat_template_kwargs": {"a": 2, "b": 1},
        "seed": 4,
        "top_k": 3,
    }
    assert sent({"input": [USER], "tool_choice": "auto", "parallel_tool_calls": True}) == {
        "model": "ephebe",
        "messages": [USER],
    }


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"content": "Yes.", "reasoning_content": "hm", "reasoning": "hm"}),
        ({"uses_interleaved_reasoning": False}, {"content": "Yes."}),
        ({"preserve_reasoning_in_assistant_content": True}, {"content": "<think>hm</think>Yes."}),
        ({"uses_reasoning_parser": False}, {"content": "<think>hm</think>Yes."}),
    ],
)
def test_reasoning_of_the_past_is_sent_as_the_settings_say(settings: Json, expected: Json) -> None:
    body = sent({"input": [USER, THOUGHT, SAID, USER]}, **settings)
    assert body["messages"][1] == {"role": "assistant", **expected}


def test_developers_are_systems_where_the_template_knows_none() -> None:
    body = {"input": [{"role": "developer", "content": "D"}, USER]}
    assert sent(body)["messages"][0]["role"] == "developer"
    assert sent(body, replace_developer_role_with_system=True)["messages"][0]["role"] == "system"


def test_an_answer_is_told_as_reasoning_text_and_calls_with_echoes_and_nulls() -> None:
    answer = completion("Yes.", reasoning_content="hm", tool_calls=[CHAT_CALL])
    answer["usage"]["prompt_tokens_details"] = {"cached_tokens": 4}
    found = told(answer, {"input": "Hi", "temperature": 0.5, "metadata": {"a": "b"}})
    reasoning, message, call = found["output"]
    assert reasoning == {
        "id": reasoning["id"],
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "hm"}],
        "encrypted_content": None,
    }
    assert reasoning["id"].startswith("rs_")
    assert message["id"].startswith("msg_")
    assert message["content"][0]["text"] == "Yes."
    assert call == {**CALL, "id": "c1", "status": "completed"}
    assert found["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": None},
        "total_tokens": 7,
    }
    assert found["id"].startswith("resp_")
    assert isinstance(found["created_at"], float)
    expected = {"temperature": 0.5, "metadata": {"a": "b"}, "tool_choice": "auto", "tools": [], "user": None}
    expected |= {"status": "completed", "model": "ephebe", "incomplete_details": None, "error": None}
    assert {key: found[key] for key in expected} == expected


def test_thoughts_anywhere_in_the_text_are_one_item_and_silence_is_an_empty_message() -> None:
    items = output_items({"content": "<think>a</think>x<think>b</think>y"}, has_thoughts=True)
    assert [one["text"] for one in items[0]["summary"]] == ["a", "b"]
    assert items[1]["content"][0]["text"] == "xy"
    assert [one["type"] for one in output_items({"content": "<think>a</think>"}, has_thoughts=True)] == ["reasoning"]
    assert output_items({"content": None}, has_thoughts=True)[0]["content"][0]["text"] == ""
    assert output_items({"content": "<think>a</think>"}, has_thoughts=False)[0]["type"] == "message"


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_answers_that_were_cut_are_incomplete(finish: str, reason: str) -> None:
    found = told(completion(finish_reason=finish))
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": reason})


def test_reasoning_from_an_endpoint_that_should_have_none_is_a_failure_that_says_what_to_set() -> None:
    found, _ = asked(always(completion("x", reasoning="hm")), RESPONSES, {"input": "Hi"}, uses_reasoning_parser=False)
    assert found.status == 500
    assert "uses_reasoning_parser: true" in found.body["failure_reason"]


def test_a_model_that_may_not_think_twice_in_a_row_ends() -> None:
    found, endpoint = asked(
        always(completion()), RESPONSES, {"input": [USER, THOUGHT]}, sequential_reasoning_allowed=False
    )
    assert found.body["incomplete_details"] == {"reason": "content_filter"}
    assert endpoint.asked == []


def test_chats_keep_fields_that_only_the_endpoint_knows() -> None:
    body = {"messages": [USER], "top_k": 5, "stream": False, "model": "another"}
    assert sent(body, CHAT) == {"messages": [USER], "top_k": 5, "model": "ephebe"}


# Text completions


def test_a_base_model_gets_one_prompt() -> None:
    text = {"id": "t", "choices": [{"index": 0, "text": " world", "finish_reason": "stop"}], "usage": None}
    items = [{"role": "system", "content": "S"}, USER]
    found, endpoint = asked(
        always(text),
        RESPONSES,
        {"input": items, "max_output_tokens": 3},
        use_completions_api=True,
        extra_body={"top_k": 1},
    )
    assert endpoint.asked == [
        ("/v1/completions", {"model": "ephebe", "prompt": "S\n\nHi", "max_tokens": 3, "top_k": 1})
    ]
    assert found.body["output"][0]["content"][0]["text"] == " world"
    refused, _ = asked(always(text), RESPONSES, {"input": [USER, SAID, USER]}, use_completions_api=True)
    assert refused.status == 422
    assert "use_completions_api: false" in str(refused.body)


def test_a_template_can_be_rendered_here_with_tools_and_all_turns() -> None:
    text = {"choices": [{"index": 0, "text": "Yes.", "finish_reason": "stop"}]}
    options: Json = {
        "use_completions_api": True,
        "render_chat_template": True,
        "tokenizer": str(bundled_model("ephebe")),
    }
    body = sent({"input": [USER, SAID, USER], "tools": [TOOL]}, answer=text, **options)
    assert body["prompt"].count("Hi") == 2
    assert body["prompt"].endswith("<|im_start|>assistant\n")
    assert "look" in body["prompt"]
    assert body.keys() == {"model", "prompt"}


def test_a_base_model_tells_its_ids_too() -> None:
    logprobs = {"tokens": ["token_id:7", "token_id:8"], "token_logprobs": [-0.1, -0.2]}
    text = {"choices": [{"text": "x", "finish_reason": "stop", "logprobs": logprobs, "prompt_token_ids": [1]}]}
    found = told(text, use_completions_api=True, return_token_id_information=True)
    last = found["output"][-1]
    assert (last["prompt_token_ids"], last["generation_token_ids"]) == ([1], [7, 8])
    assert last["generation_log_probs"] == [-0.1, -0.2]


# Refusals


@pytest.mark.parametrize(
    ("body", "place", "words"),
    [
        ([], ["body"], "object"),
        ({}, ["body", "input"], "required"),
        ({"input": "a", "top_k": 3}, ["body", "top_k"], "Extra inputs are not permitted"),
        ({"input": 3}, ["body", "input"], "str or list"),
        ({"input": "a", "temperature": "hot"}, ["body", "temperature"], "int or float"),
        ({"input": "a", "max_output_tokens": True}, ["body", "max_output_tokens"], "int"),
        ({"input": ["a"]}, ["body", "input", 0], "object"),
        ({"input": [{"content": "a"}]}, ["body", "input", 0, "type"], "role"),
        ({"input": [{"type": "message", "role": "pope"}]}, ["body", "input", 0, "role"], "developer"),
        ({"input": [{"type": "web_search_call"}]}, ["body", "input", 0, "type"], "is not supported"),
        ({"input": [{"type": "function_call", "name": "x"}]}, ["body", "input", 0], "not a complete function_call"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            ["body", "input", 0, "content", 0],
            "input_file",
        ),
        ({"input": [{"role": "user", "content": 3}]}, ["body", "input", 0, "content"], "text"),
        ({"input": [{**SAID, "prompt_token_ids": [1]}]}, ["body", "input", 0], "all three"),
        ({"input": "a", "previous_response_id": "resp_1"}, ["body", "previous_response_id"], "whole conversation"),
        ({"input": "a", "tool_choice": "required"}, ["body", "tool_choice"], "at least one tool"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, ["body", "tools", 0], "web_search"),
        ({"input": "a", "metadata": {"extra_body": "{"}}, ["body", "metadata", "extra_body"], "JSON object"),
        ({"input": "a", "metadata": {"audio_path": "a.wav"}}, ["body", "metadata", "audio_path"], "not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_place(body: Any, place: list[Any], words: str) -> None:
    found, endpoint = asked(always(completion()), RESPONSES, body)
    assert found.status == 422
    detail = found.body["detail"][0]
    assert detail["loc"] == place
    assert words in detail["msg"]
    assert endpoint.asked == []


def test_paths_that_are_not_there_are_not_found() -> None:
    assert asked(always({}), "/v1/embeddings", {})[0].status == 404
