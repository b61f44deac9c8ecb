"""Items in, items out: what a response is made of, without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.chat import ChatTokenizer
from palestra.chat.output_parser import ContentPiece, ReasoningPiece
from palestra.config.bundled import bundled_model
from palestra.server.core.errors import ApiError
from palestra.server.model_api.errors import too_long
from palestra.server.model_api.hosted_tools import ToolSettings
from palestra.server.model_api.openai_chat.events import (
    ChatAnswer,
    ChatChoice,
    ChatEvent,
    ChatFinishReason,
    ChoiceDelta,
    SampledToken,
    StreamEnded,
    StreamStarted,
    TokenUsage,
    ToolCall,
)
from palestra.server.model_api.openai_chat.messages import TOKEN_FIELDS
from palestra.server.model_api.openai_chat.schemas import ChatRequest
from palestra.server.model_api.openai_responses.compaction import REQUEST
from palestra.server.model_api.openai_responses.request import TranslatedRequest, read_input
from palestra.server.model_api.openai_responses.request import chat_request as translated
from palestra.server.model_api.openai_responses.response_body import ResponseHeader, response_body
from palestra.server.model_api.openai_responses.schemas import ResponsesRequest
from palestra.server.model_api.openai_responses.stream import response_events
from palestra.server.model_api.request_fields import OUTPUT_LOGPROBS
from palestra.store.queries.traces import TurnKey
from palestra.types import SampleResult
from palestra.types.sampling import SampledSequence, StopReason

Piece = ReasoningPiece | ContentPiece | ToolCall


def chat_request(call: ResponsesRequest) -> TranslatedRequest:
    return translated(call, ToolSettings())


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def thought(*texts: str, key: str = "summary") -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], key: [{"type": "summary_text", "text": t} for t in texts]}


def called(call_id: str = "c1", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": arguments, "status": "completed"}


def returned(call_id: str = "c1", output: Any = "5") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def tokens(*ids: int) -> dict[str, Any]:
    return {"prompt_token_ids": [1], "generation_token_ids": list(ids), "generation_log_probs": [0.0] * len(ids)}


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "output_text", "text": text} for text in texts]


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"model": "m", "input": "Hi"} | fields)


# Requests


def test_what_the_model_said_between_two_inputs_is_one_message() -> None:
    items = [user("a"), thought("x", "y"), said("b"), called("c1"), called("c2"), returned("c1"), returned("c2")]
    found = read_input([*items, thought("z", key="content"), said("d"), said("e"), user("f")], None)
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")]
    assert found.messages == [
        user("a"),
        {"role": "assistant", "content": parts("b"), "reasoning_content": "x\ny", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "tool", "tool_call_id": "c2", "content": "5"},
        {"role": "assistant", "content": parts("d", "e"), "reasoning_content": "z"},
        user("f"),
    ]
    assert found.places == ["input[0]", "input[1]", "input[5]", "input[6]", "input[7]", "input[10]"]


def test_tokens_go_on_the_message_and_end_it() -> None:
    first, second = {**thought("x"), **tokens(1, 2)}, {**called(), **tokens(3)}
    found = read_input([user("a"), first, thought("y"), second, returned()], None)
    assert [message["role"] for message in found.messages] == ["user", "assistant", "assistant", "tool"]
    assert [message.get("generation_token_ids") for message in found.messages] == [None, [1, 2], [3], None]
    assert found.messages[2]["reasoning_content"] == "y"


def test_instructions_and_leading_system_messages_are_one() -> None:
    def system(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": text}

    items = [system("developer", "b"), system("system", "c"), user("d"), system("system", "e")]
    found = read_input(items, "a")
    assert "".join(part["text"] for part in found.messages[0]["content"]) == "a\n\nb\n\nc"
    assert found.messages[1:] == [user("d"), system("system", "e")]
    assert found.places == ["instructions", "input[2]", "input[3]"]
    assert read_input(items, None).messages == items


def test_fields_get_the_names_of_chat_completions() -> None:
    schema = {"type": "object"}
    call = request(
        max_output_tokens=5,
        temperature=0.5,
        top_k=3,
        history="template",
        copy="somebody else's",
        include=[OUTPUT_LOGPROBS, "reasoning.encrypted_content"],
        top_logprobs=2,
        store=False,
        stream=True,
        truncation="disabled",
        tools=[{"type": "function", "name": "f", "description": None, "parameters": schema, "strict": False}],
        tool_choice="auto",
    )
    chat = chat_request(call).chat
    assert chat.model_dump(exclude_unset=True) == {
        "model": "m",
        "messages": [user("Hi")],
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_k": 3,
        "history": "template",
        "copy": "somebody else's",
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "tool_choice": "auto",
    }


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
        ),
        ("required", "required"),
    ],
)
def test_a_tool_is_chosen_in_the_words_of_chat_completions(theirs: Any, ours: Any) -> None:
    assert chat_request(request(tools=[{"type": "function", "name": "f"}], tool_choice=theirs)).chat.tool_choice == ours


def test_formats_get_the_shape_of_chat_completions() -> None:
    def of(**given: Any) -> Any:
        return chat_request(request(text={"format": given})).chat.response_format

    schema = {"type": "object"}
    assert of(type="text") is None
    assert of(type="json_object") == {"type": "json_object"}
    expected = {"name": "n", "schema": schema, "strict": True}
    assert of(type="json_schema", **expected) == {"type": "json_schema", "json_schema": expected}


def test_without_tools_nothing_is_said_about_choosing_them() -> None:
    chat = chat_request(request(tools=[], tool_choice="auto", parallel_tool_calls=False)).chat
    assert chat.model_fields_set == {"model", "messages"}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "send the item itself"),
    ({"input": [user("a"), {"type": "web_search_call"}]}, "input[1]", "'web_search_call'"),
    ({"input": [{}]}, "input[0]", "type is None"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0]", "role"),
    ({"input": [{"role": "user"}]}, "input[0]", "content is missing"),
    ({"input": [called() | {"arguments": {}}]}, "input[0]", "arguments"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0]", "call_id"),
    ({"input": [returned(output=None)]}, "input[0]", "output is missing"),
    ({"input": [{"type": "reasoning", "summary": [{}]}]}, "input[0].summary[0]", "text"),
    ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0]", "summary"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0]", "leave the item out"),
    ({"input": [said("a") | {"prompt_token_ids": [1]}]}, "input[0]", ", ".join(TOKEN_FIELDS[1:])),
    ({"input": [user("a") | tokens(1)]}, "input[0]", "output of the model"),
    ({"tools": [{"name": "f"}, {"type": "custom", "name": "f"}]}, "tools[1]", "two tools of the name 'f'"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [{"type": "function", "name": "f", "async": True}]}, "tools[0].async", "leave it out"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "mcp"}}, "tool_choice", "'mcp'"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
    ({"text": {"format": "json"}}, "text.format", "json_schema"),
    ({"top_logprobs": 2}, "top_logprobs", OUTPUT_LOGPROBS),
    ({"conversation": "conv_1"}, "conversation", "send previous_response_id"),
    ({"prompt": {"id": "p"}}, "prompt", "instructions"),
    ({"background": True}, "background", "stream"),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "not supported"),
    ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ({"n": 2}, "n", "one sample"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs", "dictionary"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD, ids=lambda v: str(v)[:50])
def test_what_cannot_be_done_is_refused_by_its_name_here(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_request(request(**fields))
    assert (refused.value.status, refused.value.param) == (400, param)
    assert words in refused.value.detail


TOLD: list[tuple[dict[str, Any], list[str]]] = [
    ({"text": {"verbosity": "low"}}, ["text.verbosity"]),
    ({"reasoning": {"summary": "concise", "mode": "pro"}}, ["reasoning.summary", "reasoning.mode"]),
    ({"include": ["file_search_call.results"]}, ["include.file_search_call.results"]),
    ({"truncation": "auto"}, ["truncation"]),
    ({"service_tier": "flex"}, ["service_tier"]),
    ({"newer": 1, "top_k": 5}, ["newer"]),
    ({"tools": [{"type": "web_search"}, {"type": "function", "name": "f"}]}, ["tools.web_search"]),
    # Nothing is lost with these.
    ({"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "store": False}, []),
    ({"prompt_cache_key": "x", "client_metadata": {"a": "b"}, "max_tool_calls": 3, "n": 1}, []),
]


@pytest.mark.parametrize(("fields", "ignored"), TOLD, ids=lambda v: str(v)[:50])
def test_what_is_ignored_is_told(fields: dict[str, Any], ignored: list[str]) -> None:
    assert translated(request(**fields), ToolSettings()).ignored == ignored


# Tools that are no functions

F = {"type": "function", "name": "spawn", "parameters": {"type": "object"}}
SPACE = {"type": "namespace", "name": "agents", "description": "Many.", "tools": [F]}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
}


def names(call: ChatRequest) -> list[str]:
    return [tool["function"]["name"] for tool in call.tools or []]


def test_tools_of_a_namespace_are_functions_with_its_name() -> None:
    found = translated(request(tools=[F, SPACE]), ToolSettings())
    assert names(found.chat) == ["spawn", "agents__spawn"]
    assert found.tools.item(ToolCall("c1", "agents__spawn", "{}"))["namespace"] == "agents"
    assert found.tools.item(ToolCall("c1", "spawn", "{}")) == called() | {"id": "c1", "name": "spawn"}
    without = translated(request(tools=[F, SPACE]), ToolSettings(tool_namespaces="leave_out"))
    assert (names(without.chat), without.ignored) == (["spawn"], ["tools.agents"])
    with pytest.raises(ApiError, match="'web_search' is not supported"):
        translated(request(tools=[{"type": "web_search"}]), ToolSettings(hosted_tools="refuse"))


def test_what_was_called_comes_back_as_it_was_called() -> None:
    tools = translated(request(tools=[SPACE, PATCH]), ToolSettings()).tools
    calls = [ToolCall("c1", "agents__spawn", "{}"), ToolCall("c2", "patch", '{"input": "a\\nb"}')]
    items = [user("Hi"), *map(tools.item, calls), returned(), {**returned("c2"), "type": "custom_tool_call_output"}]
    assert items[2]["input"] == "a\nb"
    message = chat_request(request(input=items, tools=[SPACE, PATCH])).chat.messages[1]
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": one.name, "arguments": one.arguments} for one in calls
    ]


def test_a_custom_tool_is_a_function_of_text() -> None:
    found = translated(request(tools=[PATCH], tool_choice={"type": "custom", "name": "patch"}), ToolSettings())
    (tool,) = found.chat.tools or []
    assert "start: /a/" in tool["function"]["description"]
    assert found.chat.tool_choice == {"type": "function", "function": {"name": "patch"}}
    odd = ToolCall("c1", "patch", '{"text": 5}')
    assert found.tools.item(odd)["input"] == odd.arguments


# Answers


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    folder = bundled_model("ephebe")
    assert folder is not None
    return ChatTokenizer.load(folder)


def answer_of(
    tokenizer: ChatTokenizer,
    pieces: Sequence[Piece],
    finish: ChatFinishReason = ChatFinishReason.STOP,
    drawn: Sequence[SampledToken] = (),
) -> ChatAnswer:
    thoughts = [piece.text for piece in pieces if isinstance(piece, ReasoningPiece)]
    sequence = SampledSequence(
        tokens=[one.token for one in drawn],
        logprobs=[one.logprob for one in drawn],
        stop_reason=StopReason.LENGTH if finish is ChatFinishReason.LENGTH else StopReason.STOP,
    )
    choice = ChatChoice(
        index=0,
        reasoning="".join(thoughts) if thoughts else None,
        content="".join(piece.text for piece in pieces if isinstance(piece, ContentPiece)),
        calls=[piece for piece in pieces if isinstance(piece, ToolCall)],
        finish=finish,
        stop=None,
        sequence=sequence,
        tokens=drawn,
    )
    usage = TokenUsage(prompt_tokens=2, completion_tokens=len(drawn), cached_tokens=1, reasoning_tokens=0)
    result = SampleResult(sequences=[sequence])
    return ChatAnswer("resp_1", TurnKey("trace_1", 0), "m", [1, 2], [choice], usage, result, tokenizer)


def streamed(header: ResponseHeader, events: Sequence[ChatEvent | Exception]) -> list[dict[str, Any]]:
    async def source() -> AsyncGenerator[ChatEvent, None]:
        for one in events:
            if isinstance(one, Exception):
                raise one
            yield one

    async def keep(answer: ChatAnswer, body: dict[str, Any]) -> None:
        pass

    async def read() -> list[bytes]:
        return [line async for line in response_events(header, source(), keep)]

    response = [line.decode().strip().split("\ndata: ") for line in asyncio.run(read())]
    assert all(name == f"event: {json.loads(data)['type']}" for name, data in response)
    return [json.loads(data) for _, data in response]


class Folded:
    """What a client has that believes in deltas alone, and what it was told in the end."""

    def __init__(self, events: Sequence[dict[str, Any]]):
        self.items: list[dict[str, Any]] = []
        self.done: dict[int, dict[str, Any]] = {}
        for number, event in enumerate(events):
            assert event["sequence_number"] == number
            self.fold(event["type"].removeprefix("response."), event)

    def fold(self, kind: str, event: dict[str, Any]) -> None:
        match kind:
            case "output_item.added":
                assert event["output_index"] == len(self.items)
                self.items.append(event["item"])
            case "reasoning_summary_part.added":
                self.item(event)["summary"].append(event["part"])
            case "content_part.added":
                self.item(event)["content"].append(event["part"])
            case "reasoning_summary_text.delta":
                self.item(event)["summary"][event["summary_index"]]["text"] += event["delta"]
            case "output_text.delta":
                self.item(event)["content"][event["content_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                self.item(event)["arguments"] += event["delta"]
            case "reasoning_summary_text.done":
                assert event["text"] == self.item(event)["summary"][0]["text"]
            case "output_text.done":
                assert event["text"] == self.item(event)["content"][0]["text"]
            case "content_part.done":
                self.item(event)["content"][0]["logprobs"] = event["part"]["logprobs"]
                assert event["part"] == self.item(event)["content"][0]
            case "function_call_arguments.done":
                assert event["arguments"] == self.item(event)["arguments"]
            case "output_item.done":
                self.done[event["output_index"]] = event["item"]
            case "completed" | "incomplete" | "failed":
                self.response = event["response"]
            case _:
                assert kind in ("created", "in_progress", "reasoning_summary_part.done")

    def item(self, event: dict[str, Any]) -> dict[str, Any]:
        item = self.items[event["output_index"]]
        assert item["id"] == event["item_id"]
        assert event["output_index"] not in self.done
        return item


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    output = [{key: value for key, value in item.items() if key != "id"} for item in body["output"]]
    return body | {"output": output}


def read_back(output: list[dict[str, Any]]) -> dict[str, Any]:
    """As the message that it is in the next request."""
    (message,) = read_input(output, None).messages
    return message | {"content": "".join(part["text"] for part in message["content"] or [])}


texts = st.sampled_from(["a", "b c", "\n\nd", "é"])
blocks = st.lists(st.sampled_from(["a", "b c", "é"]).map(ReasoningPiece) | texts.map(ContentPiece), max_size=5)
calls = st.lists(texts.map(ContentPiece) | st.builds(ToolCall, st.uuids().map(str), st.just("f"), texts), max_size=4)


def as_parsed(pieces: Sequence[Piece]) -> list[Piece]:
    """A line between thoughts that something was said between."""
    response: list[Piece] = []
    for piece in pieces:
        is_later = (
            bool(response)
            and isinstance(response[-1], ContentPiece)
            and any(isinstance(one, ReasoningPiece) for one in response)
        )
        response.append(ReasoningPiece("\n" + piece.text) if isinstance(piece, ReasoningPiece) and is_later else piece)
    return response


@given(blocks, calls, st.sampled_from([ChatFinishReason.STOP, ChatFinishReason.LENGTH]), st.booleans())
def test_a_streams_events_put_together_are_the_response(
    tokenizer: ChatTokenizer, first: list[Piece], then: list[Piece], finish: ChatFinishReason, asks_for_all: bool
) -> None:
    pieces = as_parsed([*first, *then])
    drawn = [SampledToken(token=i, logprob=-float(i)) for i in range(len(pieces) + 1)]
    fields = {"return_token_ids": True, "include": [OUTPUT_LOGPROBS]} if asks_for_all else {}
    header = ResponseHeader(request(**fields))
    answer = answer_of(tokenizer, pieces, finish, drawn)
    deltas = [ChoiceDelta(0, [piece], [token]) for piece, token in zip(pieces, drawn, strict=False)]
    events = [StreamStarted([1, 2], tokenizer), *deltas, ChoiceDelta(0, [], drawn[-1:]), StreamEnded(answer)]
    folded = Folded(streamed(header, events))
    output = folded.response["output"]
    assert [folded.done[i] for i in range(len(folded.items))] == output
    for item, whole in zip(folded.items, output, strict=True):
        assert item | {key: whole[key] for key in ("status", *TOKEN_FIELDS) if key in whole} == whole
    assert TOKEN_FIELDS[0] in output[-1] if asks_for_all else TOKEN_FIELDS[0] not in output[-1]
    plain = response_body(header, answer)
    assert read_back(output) == read_back(plain["output"])
    kinds = [type(piece) for piece in first]
    if sorted(kinds, key=lambda kind: kind is ContentPiece) == kinds:  # it did not think again after it had spoken
        assert without_ids(folded.response) == without_ids(plain)


def test_a_response_tells_the_request_back(tokenizer: ChatTokenizer) -> None:
    header = ResponseHeader(request(instructions="Be brief.", temperature=0.5, metadata={"k": "v"}))
    body = response_body(header, answer_of(tokenizer, [ContentPiece("Hi")], ChatFinishReason.LENGTH))
    assert body["id"].startswith("resp_")
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (body["instructions"], body["temperature"], body["metadata"]) == ("Be brief.", 0.5, {"k": "v"})
    assert (body["tool_choice"], body["parallel_tool_calls"], body["tools"]) == ("auto", True, [])
    assert body["previous_response_id"] is body["top_p"] is body["error"] is body["text"] is None
    assert body["output"][0]["status"] == "incomplete"


def test_nothing_at_all_is_an_empty_message(tokenizer: ChatTokenizer) -> None:
    header = ResponseHeader(request())
    answer = answer_of(tokenizer, [ReasoningPiece("")])
    plain = response_body(header, answer)
    assert [(item["type"], item["content"][0]["text"]) for item in plain["output"]] == [("message", "")]
    events = streamed(
        header, [StreamStarted([1], tokenizer), ChoiceDelta(0, [ReasoningPiece("")], []), StreamEnded(answer)]
    )
    assert without_ids(Folded(events).response) == without_ids(plain)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ApiError(429, "too many"), "rate_limit_exceeded", "too many"),
        (ApiError(503, "stopped"), "server_error", "stopped"),
        (KeyError("secret"), "server_error", "the server failed unexpectedly; its log has the details"),
    ],
)
def test_what_fails_on_the_way_ends_as_an_event(
    tokenizer: ChatTokenizer, error: Exception, code: str, message: str
) -> None:
    header = ResponseHeader(request())
    events = streamed(header, [StreamStarted([1], tokenizer), ChoiceDelta(0, [ContentPiece("a")], []), error])
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": code, "message": message}
    with pytest.raises(type(error)):
        streamed(header, [error])


# Compaction


def test_a_conversation_is_compacted_to_one_item_and_goes_on_from_it(tokenizer: ChatTokenizer) -> None:
    call = request(input=[user("a"), said("b"), {"type": "compaction_trigger"}], tools=[F])
    chat = chat_request(call).chat
    assert (chat.messages[-1], chat.tool_choice) == (user(REQUEST), "none")
    answer = answer_of(tokenizer, [ContentPiece("All is well.")])
    events = streamed(
        ResponseHeader(call),
        [
            StreamStarted([1, 2], tokenizer),
            ChoiceDelta(0, [ContentPiece("All is well.")], ()),
            StreamEnded(answer),
        ],
    )
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    (item,) = response_body(ResponseHeader(call), answer)["output"]
    assert events[-1]["response"]["output"] == [item | {"id": events[2]["item"]["id"]}]
    assert "All is well." in chat_request(request(input=[item, user("c")])).chat.messages[0]["content"]
    with pytest.raises(ApiError, match=r"input\[0\]: a conversation that was compacted elsewhere"):
        chat_request(request(input=[{"type": "compaction", "encrypted_content": "x"}]))


def test_a_stream_without_room_fails_as_clients_expect_it() -> None:
    (event,) = streamed(ResponseHeader(request()), [too_long(30, 20, "messages")])
    assert (event["type"], event["response"]["error"]["code"]) == ("response.failed", "context_length_exceeded")
