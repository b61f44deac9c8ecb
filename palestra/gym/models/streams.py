"""Sends complete answers as server-sent events: computed first, then replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypedDict
from uuid import uuid4

from palestra.gym.wire import GymResponse, encoded
from palestra.net.chat_apis import anthropic_format as anthropic
from palestra.types.anthropic import AnthropicMessage, MessageBlock, MessageEnding, MessageEvent
from palestra.types.openai import (
    ChatCompletion,
    ChunkChoice,
    CompletionChoice,
    ContentPart,
    ModelResponse,
    ResponseItem,
    StreamEvent,
)
from palestra.util.json_types import JsonPayload

DONE = b"data: [DONE]\n\n"


def streamed(events: Iterator[bytes]) -> GymResponse:
    return GymResponse(body=b"".join(events), content_type="text/event-stream")


def _event(data: StreamEvent | MessageEvent) -> bytes:
    return b"event: " + data["type"].encode() + b"\ndata: " + encoded(data) + b"\n\n"


# Chat completions


def chat_events(completion: ChatCompletion, *, has_usage: bool) -> Iterator[bytes]:
    for choice in completion["choices"]:
        for delta, finish in _deltas(choice):
            choice_out: ChunkChoice = {"index": choice.get("index", 0), "delta": delta, "finish_reason": finish}
            yield _chunk(completion, [choice_out])
    if has_usage and (usage := completion.get("usage")) is not None:
        yield _chunk(completion, [], usage=usage)
    yield DONE


def _chunk(completion: ChatCompletion, choices: list[ChunkChoice], **more: object) -> bytes:
    head = {key: completion.get(key) for key in ("id", "created", "model")}
    return b"data: " + encoded({**head, "object": "chat.completion.chunk", "choices": choices, **more}) + b"\n\n"


def _deltas(choice: CompletionChoice) -> Iterator[tuple[JsonPayload, str | None]]:
    message = choice["message"]
    yield {"role": message.get("role") or "assistant"}, None
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        yield {"reasoning_content": reasoning}, None
    if message.get("content"):
        yield {"content": message["content"]}, None
    calls = message.get("tool_calls")
    if calls:
        yield {"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]}, None
    yield {}, choice.get("finish_reason")


# Responses


class EventPlace(TypedDict, total=False):
    """Where in the answer an event is."""

    output_index: int
    item_id: str | None
    content_index: int
    summary_index: int


def response_events(response: ModelResponse, joined: Mapping[str, tuple[str, str]]) -> Iterator[bytes]:
    """`joined` has names of tools that the client knows as (namespace, name)."""
    output = [_apart(item, joined) for item in response["output"]]
    for number, event in enumerate(_response_events(response, output)):
        yield _event({**event, "sequence_number": number})


def failure_events(message: str) -> Iterator[bytes]:
    """Ends a stream with an error event: an error status would look like a broken connection, because the stream has
    begun."""
    response = {"id": f"resp_{uuid4().hex}", "object": "response", "output": [], "tools": []}
    begun = {**response, "status": "in_progress", "error": None}
    failed = {**response, "status": "failed", "error": {"code": "server_error", "message": message}}
    yield _event({"type": "response.created", "response": begun, "sequence_number": 0})
    yield _event({"type": "response.failed", "response": failed, "sequence_number": 1})


def _apart(item: ResponseItem, joined: Mapping[str, tuple[str, str]]) -> ResponseItem:
    called = item.get("name")
    if item["type"] != "function_call" or called is None or called not in joined:
        return item
    namespace, name = joined[called]
    return {**item, "namespace": namespace, "name": name}


def _response_events(response: ModelResponse, output: list[ResponseItem]) -> Iterator[StreamEvent]:
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for at, item in enumerate(output):
        yield from _item_events(at, item)
    yield {"type": "response.completed", "response": {**response, "output": output}}


def _item_events(at: int, item: ResponseItem) -> Iterator[StreamEvent]:
    where: EventPlace = {"output_index": at, "item_id": item.get("id")}
    match item["type"]:
        case "message":
            yield {"type": "response.output_item.added", "output_index": at, "item": {**item, "content": []}}
            for index, part in enumerate(item.get("content") or ()):
                yield from _text_events({**where, "content_index": index}, part)
        case "reasoning":
            yield {"type": "response.output_item.added", "output_index": at, "item": {**item, "summary": []}}
            for index, part in enumerate(item.get("summary") or ()):
                yield from _summary_events({**where, "summary_index": index}, part)
        case "function_call":
            yield {"type": "response.output_item.added", "output_index": at, "item": {**item, "arguments": ""}}
            choice_out, arguments = "response.function_call_arguments", item.get("arguments") or ""
            yield {"type": f"{choice_out}.delta", **where, "delta": arguments}
            yield {"type": f"{choice_out}.done", **where, "name": item.get("name"), "arguments": arguments}
        case _:
            yield {"type": "response.output_item.added", "output_index": at, "item": item}
    yield {"type": "response.output_item.done", "output_index": at, "item": item}


def _text_events(where: EventPlace, part: ContentPart) -> Iterator[StreamEvent]:
    kind = "refusal" if part.get("type") == "refusal" else "text"
    name = "response.refusal" if kind == "refusal" else "response.output_text"
    yield {"type": "response.content_part.added", **where, "part": {**part, kind: ""}}
    content = part.get(kind) or ""
    if content:
        yield {"type": f"{name}.delta", **where, "delta": content, "logprobs": []}
    done: StreamEvent = {"type": f"{name}.done", **where}
    done[kind], done["logprobs"] = content, []
    yield done
    yield {"type": "response.content_part.done", **where, "part": part}


def _summary_events(where: EventPlace, part: ContentPart) -> Iterator[StreamEvent]:
    yield {"type": "response.reasoning_summary_part.added", **where, "part": {**part, "text": ""}}
    yield {"type": "response.reasoning_summary_text.delta", **where, "delta": part.get("text")}
    yield {"type": "response.reasoning_summary_text.done", **where, "text": part.get("text")}
    yield {"type": "response.reasoning_summary_part.done", **where, "part": part}


# Messages


def message_events(message: AnthropicMessage) -> Iterator[bytes]:
    yield _event(anthropic.message_start(message))
    for index, block in enumerate(message["content"]):
        empty, piece = _block(block)
        yield _event(anthropic.block_start(index, empty))
        yield _event(anthropic.block_delta(index, block["type"], piece))
        yield _event(anthropic.block_stop(index))
    ended: MessageEnding = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield _event(anthropic.message_delta(ended, message["usage"]))
    yield _event(anthropic.MESSAGE_STOP)


def _block(block: MessageBlock) -> tuple[MessageBlock, str]:
    """Returns the block as it begins, and what it says."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, encoded(block["input"]).decode()
    _, text = anthropic.DELTAS[block["type"]]
    empty: MessageBlock = {**block}
    empty[text] = ""
    return empty, block[text]
