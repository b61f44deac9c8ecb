"""What is wrong is said by name, in OpenAI's envelope, with a status its SDK does not retry."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.model_api.conftest import MODEL, Ephebe

HI = [{"role": "user", "content": "Hi"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def result_of(call_id: str | None) -> dict[str, Any]:
    return {"role": "tool", "content": "12"} | ({} if call_id is None else {"tool_call_id": call_id})


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "empty"),
    ({"messages": "Hi"}, "messages", "array"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0]", "one of system"),
    ({"messages": [{"role": ["user"], "content": "Hi"}]}, "messages[0]", "one of system"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "content is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "text parts"),
    ({"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0]", "text only"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]", "function"),
    ({"messages": [*HI, CALLED, result_of("c2")]}, "messages[2]", "the id 'c2'; ids of calls so far: 'c1'"),
    ({"messages": [*HI, result_of("c1"), CALLED]}, "messages[1]", "the id 'c1'; ids of calls so far: none"),
    ({"messages": [*HI, CALLED, result_of("c1"), result_of("")]}, "messages[3]", "the id ''"),
    ({"messages": [*HI, result_of(None)]}, "messages[1]", "has not called a tool"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0]", "function"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0]", "name"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "more than"),
    ({"metadata": {"n": 10**30}}, "metadata", "cannot be stored"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ({"continue_final_message": True}, "continue_final_message", "it must be assistant"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream: false"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": "2"}, "n", "integer"),
    ({"temperature": -1}, "temperature", "greater"),
    ({"temperature": 1e308}, "temperature", "less than or equal to 100"),
    ({"top_p": 0}, "top_p", "greater"),
    ({"stop": [""]}, "stop", "empty"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token id"),
    ({"logit_bias": {"999999": 1}}, "logit_bias", "below"),
    ({"max_tokens": 0}, "max_tokens", "greater"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "one of them"),
    ({"presence_penalty": 3}, "presence_penalty", "less"),
    ({"logprobs_mode": "odd"}, "logprobs_mode", "raw"),
]


@pytest.mark.parametrize(("given", "param", "words"), BAD_CHATS, ids=lambda v: str(v)[:40])
def test_a_bad_chat_is_refused_by_name(ephebe: Ephebe, given: dict[str, Any], param: str, words: str) -> None:
    answer = ephebe.http().post("/v1/chat/completions", json={"model": MODEL, "messages": HI, "max_tokens": 1} | given)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"prompt": "x", "tools": [{"type": "function"}]}, "tools"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": [[1]] * 1025}, "prompt"),
    ],
)
def test_a_bad_completion_is_refused_by_name(ephebe: Ephebe, given: dict[str, Any], param: str) -> None:
    answer = ephebe.http().post("/v1/completions", json={"model": MODEL, "max_tokens": 1} | given)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b"{"),
        ("/v1/chat/completions", b""),
        ("/v1/chat/completions", b"[]"),
        ("/v1/chat/completions", b'{"model": "ephebe", "messages": [{"role": "user", "content": "\\ud800"}]}'),
        ("/tokenize", b'{"model": "ephebe"}'),
        ("/detokenize", b'{"tokens": [99999]}'),
        ("/v1/traces?limit=0", None),
        ("/v1/traces?format=xml", None),
    ],
)
def test_whatever_arrives_gets_an_envelope(ephebe: Ephebe, path: str, body: bytes | None) -> None:
    http = ephebe.http()
    answer = http.get(path) if body is None else http.post(path, content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


DIALECTS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]], str]] = {
    "chat": ("chat/completions", {"messages": HI, "max_tokens": 1}, [CALLED, result_of("other")], "messages[2]"),
    "responses": (
        "responses",
        {"input": HI, "max_output_tokens": 16},
        [
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "other", "output": "12"},
        ],
        "input[2]",
    ),
    "messages": (
        "messages",
        {"messages": HI, "max_tokens": 1},
        [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "other", "content": "12"}]},
        ],
        "messages[2]",
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_result_of_no_call_is_refused_where_it_stands_in_each_dialect(ephebe: Ephebe, dialect: str) -> None:
    path, body, wrong, place = DIALECTS[dialect]
    key = "input" if "input" in body else "messages"
    right = json.loads(json.dumps(wrong).replace("other", "c1"))
    answers = [
        ephebe.http().post(f"/v1/{path}", json={"model": MODEL, **body, key: [*HI, *said]}) for said in (right, wrong)
    ]
    assert [answer.status_code for answer in answers] == [200, 400], answers[0].text
    assert f"{place}: no call before it has the id 'other'" in answers[1].json()["error"]["message"]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("temperature", "status"), [(100, 200), (100.5, 400), (1e308, 400), (-0.5, 400)])
def test_a_temperature_is_bounded_in_each_dialect(
    ephebe: Ephebe, dialect: str, temperature: float, status: int
) -> None:
    path, body, *_ = DIALECTS[dialect]
    answer = ephebe.http().post(f"/v1/{path}", json={"model": MODEL, **body, "temperature": temperature})
    assert answer.status_code == status, answer.text
    if status == 400:
        assert "temperature" in answer.json()["error"]["message"]


def test_results_without_ids_are_of_what_the_assistant_said(client: openai.OpenAI) -> None:
    """As text environments tell them, whose models write calls as text."""
    said: Any = [*HI, {"role": "assistant", "content": "<call>look</call>"}, result_of(None)]
    assert client.chat.completions.create(model=MODEL, messages=said, max_tokens=1).usage


def test_values_that_ask_for_nothing_pass(client: openai.OpenAI) -> None:
    nothing = {
        "stream": False,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "audio": None,
        "echo": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "b"}],
        max_completion_tokens=1,
        extra_body=nothing | {"somebody_elses_field": 1},
    )
    assert answer.usage is not None


def test_a_full_context_is_a_permanent_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as error:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 3000}])
    assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize("model", ["no-such", "tinker://a:train:0/sampler_weights/x", "tinker://", "x:sample:0", ""])
def test_an_unknown_model_is_not_found(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "x"}])
    assert (error.value.code, error.value.param) == ("model_not_found", "model")


def test_what_waits_is_bounded_and_the_client_is_told_when_to_come_back(narrow: Ephebe) -> None:
    prompts = {"model": MODEL, "prompt": ["a", "b", "c"], "max_tokens": 200, "ignore_eos": True}
    answer = narrow.http().post("/v1/completions", json=prompts)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
