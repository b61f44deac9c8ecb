"""Messages calls as the chat calls they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from palestra.chat import ChatTokenizer
from palestra.config.bundled import bundled_model
from palestra.server.core.errors import ApiError
from palestra.server.model_api.anthropic_messages.conversation import read_conversation
from palestra.server.model_api.anthropic_messages.request import chat_request as translated
from palestra.server.model_api.anthropic_messages.request import ignores_thinking
from palestra.server.model_api.anthropic_messages.schemas import MessagesRequest
from palestra.server.model_api.hosted_tools import ToolSettings
from palestra.server.model_api.openai_chat.schemas import ChatRequest

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


def chat_request(call: MessagesRequest, settings: ToolSettings | None = None) -> ChatRequest:
    return translated(call, settings or ToolSettings()).chat


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
    (user({"type": "image", "source": {}}), "messages[0].content[0]: its source must be"),
    (user({"type": "document", "source": {}}), "'document' is not supported"),
    (user(result([{"type": "image"}])), "messages[0].content[0].content[0]: its source must be"),
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
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "'clear_tool_uses_20250919'"),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "edits[0]: keep is missing"),
    ({"context_management": {"foo": 1}}, "'foo' is not supported"),
    ({"context_management": {"edits": 5}}, "context_management.edits: it must be a list"),
    ({"stop": ["x"]}, "with Messages, send stop_sequences"),
    ({"n": 2}, "n is a field of chat completions; with Messages, a Message is one answer"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "less than max_tokens, which is 5"),
    (
        {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs.enable_thinking says the opposite",
    ),
    ({"tools": [TOOL | {"allowed_callers": ["code_execution_20260120"]}]}, "tools[0]: allowed_callers"),
    ({"tools": [{"name": "f"}]}, "tools[0]: input_schema is None"),
    ({"tool_choice": {"type": "tool"}}, 'a name is needed with type "tool"'),
    ({"messages": [{"role": "user", "content": "Hi"}, assistant(USE)]}, "send their tool_result blocks after it"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED)
def test_nothing_is_silently_ignored(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_request(request(**fields))
    assert (refused.value.status, said in refused.value.detail) == (400, True), refused.value.detail


TOLD: list[tuple[dict[str, Any], list[str]]] = [
    ({"service_tier": "priority"}, ["service_tier"]),
    ({"speed": "fast"}, ["speed"]),
    ({"output_config": {"task_budget": {"total": 5}}}, ["output_config.task_budget"]),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, ["tools.web_search_20250305"]),
    ({"tools": [TOOL | {"input_examples": [{}]}]}, ["input_examples.count"]),
    ({"newer_field": 1, "temperature": 0.5}, ["newer_field"]),
    ({"verbosity": "low"}, ["verbosity"]),
    # Nothing is lost with these.
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, []),
    ({"cache_control": {"type": "ephemeral"}, "betas": ["x"], "service_tier": "auto"}, []),
    ({"metadata": {"user_id": "me"}, "thinking": {"type": "adaptive"}}, []),
]


@pytest.mark.parametrize(("fields", "ignored"), TOLD)
def test_what_is_ignored_is_told(fields: dict[str, Any], ignored: list[str]) -> None:
    assert translated(request(**fields), ToolSettings()).ignored == ignored


def test_tools_that_a_vendor_would_run_can_be_refused() -> None:
    search = request(tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}])
    assert [tool["function"]["name"] for tool in chat_request(search).tools or []] == ["count"]
    with pytest.raises(ApiError, match=r"tools\[1\]: a tool of type 'web_search_20250305' is not supported"):
        chat_request(search, ToolSettings(hosted_tools="refuse"))


LATER = {"name": "fetch", "input_schema": {"type": "object"}, "defer_loading": True}


def test_a_deferred_tool_is_shown_where_a_result_refers_to_it() -> None:
    found = result([{"type": "tool_reference", "tool_name": "fetch"}])
    before = chat_request(request(tools=[TOOL, LATER]))
    after = chat_request(request(tools=[TOOL, LATER], messages=[user(text("Hi")), assistant(USE), user(found)]))
    assert [tool["function"]["name"] for tool in after.tools or []] == ["count"]
    assert before.tools == after.tools
    assert (before.deferred_tools, [tool["function"]["name"] for tool in after.callable_tools]) == (
        None,
        ["count", "fetch"],
    )
    assert json.loads(after.messages[-1]["content"])["function"]["name"] == "fetch"
    unknown = result([{"type": "tool_reference", "tool_name": "other"}])
    with pytest.raises(ApiError, match=r"messages\[2\].content\[0\].content\[0\]: it refers to the tool 'other'"):
        chat_request(request(tools=[TOOL], messages=[user(text("Hi")), assistant(USE), user(unknown)]))


def test_deferred_tools_that_only_the_vendor_could_find_are_listed() -> None:
    call = chat_request(request(tools=[LATER, {"type": "tool_search_tool_regex_20251119", "name": "search"}]))
    assert [tool["function"]["name"] for tool in call.tools or []] == ["fetch"]


def test_thinking_is_ignored_where_the_template_does_not_know_it(tmp_path: Path) -> None:
    folder = bundled_model("ephebe")
    assert folder is not None
    knowing = ChatTokenizer.load(folder)
    shutil.copytree(folder, tmp_path / "m")
    template = tmp_path / "m" / "chat_template.jinja"
    template.write_text(template.read_text().replace("enable_thinking", "other"))
    ignorant = ChatTokenizer.load(tmp_path / "m")
    for thinking in ({"type": "enabled"}, {"type": "disabled"}):
        assert not ignores_thinking(request(thinking=thinking), knowing)
        assert ignores_thinking(request(thinking=thinking), ignorant)
    assert not ignores_thinking(request(thinking={"type": "adaptive"}), ignorant)
