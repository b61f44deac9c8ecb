"""Writes an answer in the format of the Responses API: items, and around them the fields of the request."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import TypedDict

from palestra.types.openai import ContentPart, ModelResponse, ResponseItem, ResponseUsage
from palestra.util.json_types import JsonMapping, JsonPayload

ECHOED = (
    *("background", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id"),
    *("prompt", "reasoning", "service_tier", "temperature", "text", "top_logprobs", "top_p", "truncation", "user"),
)
"""Fields of a request that are repeated in its response, null if they were not given."""
TOOL_FIELDS = ("tool_choice", "parallel_tool_calls", "tools")


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def response_body(
    request: JsonMapping,
    *,
    model: str,
    status: str,
    output: Sequence[ResponseItem] = (),
    response_id: str | None = None,
    created_at: float | None = None,
    **more: object,
) -> ModelResponse:
    """`request` has the fields in `ECHOED` and `TOOL_FIELDS`, as far as they were given."""
    choice = request.get("tool_choice")
    body: ModelResponse = {
        "id": response_id or new_id("resp"),
        "object": "response",
        "created_at": time.time() if created_at is None else created_at,
        "model": model,
        "status": status,
        "output": list(output),
        "usage": None,
        "incomplete_details": None,
        "error": None,
        "tool_choice": "auto" if choice is None else choice,
        "parallel_tool_calls": request.get("parallel_tool_calls") is not False,
        "tools": request.get("tools") or [],
    }
    for name in ECHOED:
        body[name] = request.get(name)
    for name, value in more.items():
        body[name] = value
    return body


class ResponseEnding(TypedDict):
    status: str
    incomplete_details: dict[str, str] | None


def ending(reason: str | None) -> ResponseEnding:
    """Returns `status` and `incomplete_details`; None: the answer is complete."""
    details = None if reason is None else {"reason": reason}
    return {"status": "completed" if reason is None else "incomplete", "incomplete_details": details}


def usage_body(read: int, written: int, *, cached: int | None, reasoned: int | None) -> ResponseUsage:
    """Counts that are not known are null."""
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": reasoned},
        "total_tokens": read + written,
    }


# Items


def output_items(
    reasoning: ResponseItem | None, message: ResponseItem, calls: Iterable[ResponseItem], *, has_text: bool
) -> list[ResponseItem]:
    """Returns items for reasoning, text and calls; an empty text only if there is nothing else."""
    before = [] if reasoning is None else [reasoning]
    after = list(calls)
    items = [message] if has_text or not (before or after) else []
    return [*before, *items, *after]


def reasoning_item(item_id: str, texts: Iterable[str]) -> ResponseItem:
    """Returns an item with all of the reasoning as its summary, which is what clients show and send back."""
    summary = [summary_part(text) for text in texts]
    return {"id": item_id, "type": "reasoning", "summary": summary, "encrypted_content": None}


def summary_part(text: str) -> ContentPart:
    return {"type": "summary_text", "text": text}


def message_item(item_id: str, content: Sequence[ContentPart], status: str = "completed") -> ResponseItem:
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": list(content)}


def text_part(text: str, logprobs: Sequence[JsonPayload] | None = None) -> ContentPart:
    listed = None if logprobs is None else list(logprobs)
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": listed}


def call_item(call_id: str, name: str, arguments: str, status: str = "completed") -> ResponseItem:
    return {
        "id": call_id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }
