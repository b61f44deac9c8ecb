"""Converts Anthropic's Messages to Responses, and back."""

from __future__ import annotations

from typing import Any, TypedDict
from uuid import uuid4

import orjson

from palestra.gym.errors import BadRequest, FieldPath
from palestra.gym.wire import encoded
from palestra.net.chat_apis.anthropic_format import STOP_REASONS, TOOL_CHOICES, new_message, tool_use
from palestra.types.anthropic import AnthropicMessage, MessageBlock
from palestra.types.openai import ContentPart, FunctionTool, ModelResponse, ResponseItem, ResponsesParams
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload

SAME = ("model", "temperature", "top_p")
BEYOND = {"stop_sequences": "stop", "top_k": "top_k"}
"""Fields that Responses do not have, but chat completions do."""
NO_SCHEMA = {"type": "object", "properties": {}}


def as_responses(body: JsonMapping) -> tuple[ResponsesParams, JsonPayload]:
    """Returns a request's parameters, and further fields for the endpoint. Unknown fields pass, because harnesses send
    many."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest(("messages",), "Field required: a list of messages", kind="missing")
    params: ResponsesParams = {"input": []}
    for at, message in enumerate(messages):
        try:
            params["input"] += _items(message, ("messages", at))
        except (KeyError, TypeError, AttributeError) as e:
            raise BadRequest(("messages", at), f"not a complete message ({type(e).__name__}: {e})") from None
    for key in SAME:
        if body.get(key) is not None:
            params[key] = body[key]
    if body.get("max_tokens") is not None:
        params["max_output_tokens"] = body["max_tokens"]
    system = _text(body.get("system") or "", ("system",))
    if system:
        params["instructions"] = system
    return {**params, **_tools(body)}, {
        there: body[here] for here, there in BEYOND.items() if body.get(here) is not None
    }


def _items(message: JsonMapping, place: FieldPath) -> list[ResponseItem]:
    """Returns items: text and images of a message together; calls, results and reasoning each by itself, in their
    order."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        return [{"type": "message", "role": role, "content": content}]
    items: list[ResponseItem] = []
    parts: list[ContentPart] = []

    def flush() -> None:
        if parts:
            is_plain = len(parts) == 1 and parts[0]["type"] == "input_text"
            items.append(
                {"type": "message", "role": role, "content": parts[0].get("text") if is_plain else list(parts)}
            )
            parts.clear()

    for at, block in enumerate(content):
        part = _part(block, (*place, "content", at))
        if part is not None:
            parts.append(part)
        else:
            flush()
            items.append(_item(block, (*place, "content", at)))
    flush()
    return items


def _part(block: JsonMapping, place: FieldPath) -> ContentPart | None:
    if block["type"] == "text":
        return {"type": "input_text", "text": block["text"]}
    if block["type"] != "image":
        return None
    source = block["source"]
    if source["type"] == "url":
        return {"type": "input_image", "image_url": source["url"], "detail": "auto"}
    if source["type"] != "base64":
        raise BadRequest(place, f"an image of source {source['type']!r}: only base64 and url are supported")
    return {
        "type": "input_image",
        "image_url": f"data:{source['media_type']};base64,{source['data']}",
        "detail": "auto",
    }


def _item(block: JsonMapping, place: FieldPath) -> ResponseItem:
    match block["type"]:
        case "tool_use":
            arguments = encoded(block.get("input") or {}).decode()
            return {
                "type": "function_call",
                "id": block["id"],
                "status": "completed",
                "call_id": block["id"],
                "name": block["name"],
                "arguments": arguments,
            }
        case "tool_result":
            output = _text(block.get("content") or "", (*place, "content"))
            return {"type": "function_call_output", "call_id": block["tool_use_id"], "output": output}
        case "thinking":
            summary: list[ContentPart] = [{"type": "summary_text", "text": block["thinking"]}]
            return {"type": "reasoning", "id": f"rs_{uuid4().hex}", "summary": summary}
        case kind:
            raise BadRequest(place, f"a block of type {kind!r} is not supported", given=kind)


def _text(content: Any, place: FieldPath) -> str:
    if isinstance(content, str):
        return content
    try:
        kinds = {block["type"] for block in content} - {"text"}
        texts = [block["text"] for block in content if block["type"] == "text"]
    except (KeyError, TypeError):
        raise BadRequest(place, "Input should be text or a list of text blocks", given=content) from None
    if kinds:
        raise BadRequest(place, f"only text is supported, not {', '.join(sorted(map(str, kinds)))}")
    return "\n".join(texts)


class ResponsesToolFields(TypedDict, total=False):
    tools: list[FunctionTool]
    tool_choice: object
    parallel_tool_calls: bool


def _tools(body: JsonMapping) -> ResponsesToolFields:
    chosen: ResponsesToolFields = {}
    tools = body.get("tools")
    if tools:
        if not isinstance(tools, list):
            raise BadRequest(("tools",), "Input should be a list", given=tools)
        chosen["tools"] = [_tool(tool, at) for at, tool in enumerate(tools)]
    choice = body.get("tool_choice")
    if choice is not None:
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind == "tool":
            chosen["tool_choice"] = {"type": "function", "name": choice.get("name")}
        elif isinstance(kind, str) and kind in TOOL_CHOICES:
            chosen["tool_choice"] = TOOL_CHOICES[kind]
        else:
            raise BadRequest(
                ("tool_choice",), "Input should be an object of type auto, any, tool or none", given=choice
            )
        if choice.get("disable_parallel_tool_use"):
            chosen["parallel_tool_calls"] = False
    return chosen


def _tool(tool: object, at: int) -> FunctionTool:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or tool.get("type", "custom") != "custom":
        raise BadRequest(
            ("tools", at), "only tools that the client defines, with a name and an input_schema, are supported"
        )
    schema = tool.get("input_schema") or NO_SCHEMA
    return {"type": "function", "name": tool["name"], "description": tool.get("description"), "parameters": schema}


# Answers

FINISH_REASONS = {"max_output_tokens": "length", "content_filter": "content_filter"}
"""Finish reasons by the reason why a response is incomplete."""


def as_message(response: ModelResponse, *, model: str) -> AnthropicMessage:
    content: list[MessageBlock] = []
    for item in response["output"]:
        content += _blocks(item)
    complete = "tool_calls" if any(block["type"] == "tool_use" for block in content) else "stop"
    reason = (response.get("incomplete_details") or {}).get("reason")
    usage = response.get("usage") or {}
    return {
        **new_message(f"msg_{uuid4().hex}", model),
        "content": content,
        "stop_reason": STOP_REASONS[FINISH_REASONS.get(reason or "", complete)],
        "stop_sequence": None,
        "usage": {"input_tokens": usage.get("input_tokens", 0), "output_tokens": usage.get("output_tokens", 0)},
    }


def _blocks(item: ResponseItem) -> list[MessageBlock]:
    match item["type"]:
        case "message":
            return [
                {"type": "text", "text": part.get("text") or part.get("refusal") or ""}
                for part in item.get("content") or ()
            ]
        case "reasoning":
            thoughts = (one.get("text") or "" for one in item.get("summary") or ())
            return [{"type": "thinking", "thinking": thought, "signature": ""} for thought in thoughts]
        case "function_call":
            return [tool_use(item.get("call_id"), item.get("name"), _input(item.get("arguments") or ""))]
        case _:
            return []


def _input(arguments: str) -> JsonObject:
    """Returns an object, whatever the model wrote: blocks cannot have anything else."""
    try:
        parsed = orjson.loads(arguments or "{}")
    except ValueError:
        return {"_raw": arguments}
    return parsed if isinstance(parsed, dict) else {"_raw": arguments}
