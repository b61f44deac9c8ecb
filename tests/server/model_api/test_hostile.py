"""Requests that are meant to hurt get an answer or a refusal that says what is wrong, never a 500."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.model_api.conftest import MODEL, Ephebe

HI = {"role": "user", "content": "Hi"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def post(ephebe: Ephebe) -> Callable[..., httpx.Response]:
    http = ephebe.http()

    def send(path: str = CHAT, **fields: Any) -> httpx.Response:
        return http.post(path, json={"model": MODEL, "max_tokens": 1} | fields)

    return send


def refused(answer: httpx.Response, param: str, words: str) -> None:
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


# Names of what a template is given


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "continue_final_message"])
@pytest.mark.parametrize("history", [[HI], [HI, {"role": "assistant", "content": "a"}, HI]], ids=["new", "going on"])
def test_what_the_request_says_itself_is_no_template_option(
    post: Callable[..., httpx.Response], name: str, history: list[Any]
) -> None:
    answer = post(messages=history, chat_template_kwargs={name: 1})
    refused(answer, "chat_template_kwargs", f"{name} is a field of the request itself")


@pytest.mark.parametrize("name", ["self", "template", "kwargs", "max_tokens", "template_kwargs", "turn", "thought"])
def test_a_template_option_may_have_any_other_name(post: Callable[..., httpx.Response], name: str) -> None:
    for history in ([HI], [HI, {"role": "assistant", "content": "a"}, HI]):
        answer = post(messages=history, chat_template_kwargs={name: "x"})
        assert answer.status_code == 200, answer.text


# Arguments


@pytest.mark.parametrize(
    "arguments",
    [
        *('{"a":"\\ud800"}', '{"\\udfff":1}', '{"a":NaN}', '{"a":1e999}', "[1]", "{"),
        *(nested(depth) for depth in (100, 101, 300)),
    ],
    ids=lambda text: text[:16],
)
def test_arguments_of_any_kind_are_shown(post: Callable[..., httpx.Response], arguments: str) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    answer = post("/tokenize", messages=[HI, said, {"role": "tool", "tool_call_id": "c", "content": "r"}])
    assert answer.status_code == 200, answer.text
    shown = post("/detokenize", tokens=answer.json()["tokens"]).json()["prompt"]
    assert arguments.replace(" ", "") in shown.replace(" ", "")


@pytest.mark.parametrize("depth", [490, 800, 5000])
def test_arguments_of_any_depth_are_read_as_text(post: Callable[..., httpx.Response], depth: int) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": nested(depth)}}]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    answer = post(messages=[HI, said, {"role": "tool", "tool_call_id": "c", "content": "r"}])
    assert answer.status_code == 200 or "maximum context length" in answer.text


def test_deep_objects_are_refused_by_name(post: Callable[..., httpx.Response]) -> None:
    deep = json.loads(nested(150))
    refused(post(messages=[HI], chat_template_kwargs=deep), "chat_template_kwargs", "100 levels deep")
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    refused(post(messages=[HI], tools=[tool]), "tools[0]", "100 levels deep")
    said = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": deep}}]}
    refused(post(messages=[HI, said]), "messages[1].tool_calls[0].function.arguments", "100 levels deep")
    for field in ("chat_template_kwargs", "metadata"):
        answer = post(messages=[HI], **{field: json.loads(nested(400))})
        assert (answer.status_code, "recursion limit" in answer.text) == (400, True)


# Size


def test_messages_are_not_without_number(post: Callable[..., httpx.Response]) -> None:
    refused(post(messages=[HI] * 16385), "messages", "at most 16384")


@pytest.mark.parametrize(
    ("path", "fields"),
    [(CHAT, {"messages": [HI | {"content": "ab " * 100_000}]}), (TEXT, {"prompt": "ab " * 100_000})],
)
def test_what_cannot_fit_is_refused_before_it_is_encoded(
    post: Callable[..., httpx.Response], path: str, fields: dict[str, Any]
) -> None:
    answer = post(path, **fields)
    refused(answer, next(iter(fields)), "at least 18")  # thousand: of no more than 16 characters each
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_thoughts_without_number_are_only_too_long(post: Callable[..., httpx.Response]) -> None:
    said = {"role": "assistant", "content": "<think>a</think>" * 10_000 + "Hi"}
    answer = post(messages=[HI, said, HI])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert post("/tokenize", messages=[HI, said, HI]).json()["count"] > 2048  # there is no context to fit in


def test_tokens_of_a_long_text_are_told_one_by_one(post: Callable[..., httpx.Response]) -> None:
    response = post("/tokenize", prompt="ab " * 1000, return_token_strs=True).json()
    assert "".join(response["token_strs"]) == "ab " * 1000
    assert len(response["token_strs"]) == response["count"]


# Changed histories


@pytest.mark.parametrize(
    ("text", "content", "changed"),
    [
        ("abc</think>xyz", "abc</think>xyz", ["CHANGED</think>xyz", "xyz", "<think>abc</think>xyz"]),
        ("Hi <think>p</think> there", "Hi  there", ["Hi <think>CHANGED</think> there", "Hi"]),
    ],
)
def test_a_changed_answer_is_a_branch(
    post: Callable[..., httpx.Response], ephebe: Ephebe, text: str, content: str, changed: list[str]
) -> None:
    asks = [{"role": "user", "content": f"Say {text}"}]
    options = {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 60}
    first = post(messages=asks, structured_outputs={"choice": [text]}, **options).json()
    response = first["choices"][0]["message"]
    assert response["content"] == content

    def match(said: str) -> tuple[str, bool]:
        history = [*asks, {"role": "assistant", "content": said}, HI]
        trace_id = post(messages=history, **options).json()["trace_id"]
        turns = ephebe.http().get(f"/v1/traces/{trace_id}").json()["turns"]
        return turns[-1]["match"], trace_id == first["trace_id"]

    assert match(content) == ("continued", True)
    assert [match(said) for said in changed] == [("unmatched", False)] * len(changed)


def test_a_number_of_any_size_comes_back_as_it_was_sent(ephebe: Ephebe) -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 10**30}}}
    tools = [{"type": "function", "name": "f", "parameters": parameters}]
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 2, "tools": tools, "tool_choice": "none"}
    for stream in (False, True):
        answer = ephebe.http().post("/v1/responses", json=body | {"stream": stream})
        assert answer.status_code == 200, answer.text
        assert str(10**30) in answer.text


def test_a_header_that_is_no_count_is_no_retry(ephebe: Ephebe) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    for count in ("9" * 4400, "-1", "²", "x"):
        headers = {"x-stainless-retry-count": count.encode()}
        assert ephebe.http().post("/v1/chat/completions", json=body, headers=headers).status_code == 200
