"""Chat calls in the forms of OpenAI and Anthropic; that servers take them is shown with ours in other tests."""

from __future__ import annotations

import pytest

from palestra.net.chat_apis import NotAnAnswer, StreamedAnswer, chat_api, endpoint_url, error_of
from palestra.types import StopReason

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": ""},
    {"role": "tool", "content": "4"},
]


@pytest.mark.parametrize(
    ("url", "name", "api"),
    [
        ("http://127.0.0.1:8000/v1", "auto", "openai"),
        ("https://api.anthropic.com/v1", "auto", "anthropic"),
        ("https://notanthropic.com/v1", "auto", "openai"),
        ("http://127.0.0.1:8000/v1", "anthropic", "anthropic"),
        ("https://api.anthropic.com/v1", "openai", "openai"),
    ],
)
def test_the_address_says_which_api(url, name, api):
    assert chat_api(name, url).name == api


def test_endpoint_without_a_path_is_at_v1():
    assert endpoint_url("http://here:1/") == endpoint_url("http://here:1/v1") == "http://here:1/v1"
    assert endpoint_url("https://gateway/openai/v2/") == "https://gateway/openai/v2"


def test_openais_newer_name_of_the_limit_is_for_openai_alone():
    options = {"max_tokens": 5, "seed": 1}
    assert chat_api("auto", "http://here/v1").body("m", MESSAGES, options)["max_tokens"] == 5
    body = chat_api("auto", "https://api.openai.com/v1").body("m", MESSAGES, options)
    assert (body["max_completion_tokens"], "max_tokens" in body) == (5, False)


def test_chat_becomes_a_messages_request():
    api = chat_api("anthropic", "http://here/v1")
    body = api.body("m", MESSAGES, {"temperature": 0.5, "top_p": 1.0, "seed": 1, "logprobs": True})
    assert body == {
        "model": "m",
        "max_tokens": 4096,
        "temperature": 0.5,
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "(nothing)"},
            {"role": "user", "content": "4"},
        ],
    }
    assert api.headers("k")["x-api-key"] == "k"


def test_answers_of_both_are_read_alike():
    openai = {
        "choices": [{"message": {"content": "4", "refusal": None}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2},
    }
    anthropic = {
        "content": [{"type": "text", "text": "4"}],
        "stop_reason": "max_tokens",
        "usage": {"input_tokens": 4, "cache_read_input_tokens": 5, "output_tokens": 2},
    }
    answers = [
        chat_api(name, "http://here/v1").answer(body) for name, body in (("openai", openai), ("anthropic", anthropic))
    ]
    assert answers[0] == answers[1]
    assert (answers[0].text, answers[0].stop, answers[0].tokens) == ("4", StopReason.LENGTH, 11)


def test_streams_of_both_are_read_alike():
    def whole(name: str, events: list[dict]) -> StreamedAnswer:
        answer = StreamedAnswer()
        for event in events:
            answer.add(chat_api(name, "http://here/v1").piece(event))
        return answer

    openai = [
        {"choices": [{"delta": {"reasoning_content": "Hm."}}]},
        {"choices": [{"delta": {"content": "4"}, "finish_reason": None}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}},
    ]
    anthropic = [
        {"type": "message_start", "message": {"usage": {"input_tokens": 9}}},
        {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "Hm."}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "4"}},
        {"type": "ping"},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
    ]
    assert whole("openai", openai) == whole("anthropic", anthropic)
    assert whole("openai", openai).message == {"role": "assistant", "content": "4", "reasoning_content": "Hm."}


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_what_is_no_answer_says_so(name):
    api = chat_api(name, "http://here/v1")
    for body in ({}, {"choices": []}, {"content": 3}, {"type": "message_start"}):
        with pytest.raises(NotAnAnswer):
            api.answer(body)
    assert error_of({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}) == (
        "Overloaded",
        "",
    )
    assert error_of("no") is None
