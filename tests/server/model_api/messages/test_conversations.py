"""Messages calls as the chat calls they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from palestra.chat import ChatTokenizer
from palestra.config.bundled import bundled_model
from palestra.server.core.errors import ApiError
from palestra.server.model_api.messages.messages import read_conversation
from palestra.server.model_api.messages.request import chat_request, check_thinking
from palestra.server.model_api.messages.schemas import MessagesRequest

TOOL = {"name": "count", "description": "How many there are.", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "count", "input": {"item": "cups"}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def result(content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **fields}


def request(**fields: Any) -> MessagesRequest:
    given = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]} | fields
    return MessagesRequest.model_validate(given)


def test_results_become_messages_of_their_own_in_their_place() -> None:
    messages = [
        {"role": "user", "content": "How many?"},
        assistant({"type": "thinking", "thinking": "Count.", "signature": "x"}, text("Let me see."), USE),
        user(result([text("1"), text("2")]), text("And "), text("now?"), result("x", is_error=True)),
    ]
    function = {"name": "count", "arguments": {"item": "cups"}}
    assert read_conversation([text("Be "), text("brief.")], messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Count.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "12"},
        {"role": "user", "content": "And now?"},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: x"},
    ]


def test_neighbours_of_one_role_are_one_turn() -> None:
    redacted = {"type": "redacted_thinking", "data": "x"}
    messages = [user(text("a")), user(text("b")), assistant(text("It is ("), redacted), assistant(text("B)"), USE)]
    request, answered = read_conversation(None, messages)
    assert request == {"role": "user", "content": "a\n\nb"}
    assert (answered["content"], len(answered["tool_calls"])) == ("It is (B)", 1)
    assert "reasoning_content" not in answered


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, ""), ("", "Error: "), ("Error: gone", "Error: gone"), ([text("no")], "Error: no")],
)
def test_a_failed_tool_says_so_once(content: Any, said: str) -> None:
    is_error = content is not None
    _, message = read_conversation(None, [assistant(USE), user(result(content, is_error=is_error))])
    assert message["content"] == said


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"role": "wizard", "content": "x"}, "messages[0]: role is 'wizard'"),
    ({"role": "user"}, "messages[0].content: it must be a string, or a list of blocks"),
    (user(), "messages[0].content: it is empty"),
    (user("x"), "messages[0].content[0]: 'x' is not a block"),
    (user({"type": "text"}), "messages[0].content[0]: text is None"),
    (user({"type": "image", "source": {}}), "'image' is not supported"),
    (user({"type": "document", "source": {}}), "'document' is not supported"),
    (user(result([{"type": "image"}])), "messages[0].content[0].content[0]: a block of type 'image' is not supported"),
    (user(USE), "is allowed only in an assistant's message"),
    (assistant(result("x")), "is allowed only in a user's message"),
    (assistant({**USE, "input": "x"}), "messages[0].content[0]: input is 'x'; it must be an object"),
    (assistant({"type": "server_tool_use"}), "'server_tool_use' is not supported"),
    ({"role": "system", "content": [USE]}, "is allowed only in an assistant's message"),
]


@pytest.mark.parametrize(("message", "said"), WRONG)
def test_what_is_wrong_is_said_with_its_place(message: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_conversation(None, [message])
    assert said in refused.value.detail


def test_fields_become_those_of_a_chat_call() -> None:
    call = chat_request(
        request(
            stop_sequences=["END"],
            temperature=0.5,
            top_k=3,
            seed=7,
            service_tier="standard_only",
            metadata={"user_id": "me", "task": 1},
            tools=[TOOL | {"cache_control": {"type": "ephemeral"}}],
            tool_choice={"type": "auto"},
            thinking={"type": "disabled"},
            chat_template_kwargs={"style": "short"},
            return_token_ids=True,
            newer_field=1,
        )
    )
    assert (call.stops, call.max_tokens, call.temperature, call.top_k, call.seed) == (("END",), 5, 0.5, 3, 7)
    assert (call.user, call.metadata) == ("me", {"user_id": "me", "task": 1})
    assert call.chat_template_kwargs == {"style": "short", "enable_thinking": False}
    assert (call.tool_choice, call.logprobs, call.return_token_ids) == ("auto", True, True)
    function = {"name": "count", "description": "How many there are.", "parameters": {"type": "object"}}
    assert call.tools == [{"type": "function", "function": function}]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"container": "c"}, "container: 'c' is not supported"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"service_tier": "priority"}, "service_tier: 'priority'"),
    ({"speed": "fast"}, "speed: 'fast'"),
    ({"output_config": {"task_budget": {"total": 5}}}, "task_budget"),
    ({"stop": ["x"]}, "with Messages, send stop_sequences"),
    ({"n": 2}, "n is a field of chat completions; with Messages, a Message is one answer"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "less than max_tokens, which is 5"),
    (
        {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs.enable_thinking says the opposite",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]: type: 'web_search_20250305'"),
    ({"tools": [TOOL | {"input_examples": [{}]}]}, "tools[0]: input_examples"),
    ({"tools": [{"name": "f"}]}, "tools[0]: input_schema is None"),
    ({"tool_choice": {"type": "tool"}}, 'a name is needed with type "tool"'),
    ({"messages": [{"role": "user", "content": "Hi"}, assistant(USE)]}, "send their tool_result blocks after it"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED)
def test_nothing_is_silently_ignored(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_request(request(**fields))
    assert (refused.value.status, said in refused.value.detail) == (400, True), refused.value.detail


def test_thinking_is_refused_where_the_template_does_not_know_it(tmp_path: Path) -> None:
    folder = bundled_model("ephebe")
    assert folder is not None
    knowing = ChatTokenizer.load(folder)
    shutil.copytree(folder, tmp_path / "m")
    template = tmp_path / "m" / "chat_template.jinja"
    template.write_text(template.read_text().replace("enable_thinking", "other"))
    ignorant = ChatTokenizer.load(tmp_path / "m")
    for thinking in ({"type": "enabled"}, {"type": "disabled"}):
        check_thinking(request(thinking=thinking), knowing)
        with pytest.raises(ApiError, match="has no enable_thinking"):
            check_thinking(request(thinking=thinking), ignorant)
    check_thinking(request(thinking={"type": "adaptive"}), ignorant)
