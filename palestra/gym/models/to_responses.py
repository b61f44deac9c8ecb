"""A chat answer as a response.

Owns: NeMo Gym's rules for items, usage and echoes in this direction. Never touches: the network.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from palestra.gym.records import TOKEN_FIELDS

THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
ECHOED = (
    "background",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "previous_response_id",
    "prompt",
    "reasoning",
    "service_tier",
    "temperature",
    "text",
    "top_logprobs",
    "top_p",
    "truncation",
    "user",
)
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def response(
    params: Mapping[str, Any], completion: Mapping[str, Any], *, model: str, has_thoughts: bool
) -> dict[str, Any]:
    """`completion` has its thinking in think tags and its ids on the message; only its first choice counts."""
    choice = completion["choices"][0]
    reason = INCOMPLETE.get(choice.get("finish_reason"))
    told: dict[str, Any] = {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": float(completion.get("created") or time.time()),
        "model": model,
        "status": "completed" if reason is None else "incomplete",
        "output": output_items(choice["message"], has_thoughts=has_thoughts),
        "usage": usage(completion.get("usage")),
        "incomplete_details": None if reason is None else {"reason": reason},
        "error": None,
        "tool_choice": params.get("tool_choice", "auto"),
        "parallel_tool_calls": params.get("parallel_tool_calls", True),
        "tools": params.get("tools", []),
    }
    for key in ECHOED:
        told[key] = params.get(key)
    return told


def output_items(message: Mapping[str, Any], *, has_thoughts: bool) -> list[dict[str, Any]]:
    """Reasoning, text, calls, in this order; ids on the last of them."""
    text = message.get("content") or ""
    thoughts: list[str] = []
    if has_thoughts and "<think>" in text:
        thoughts = THOUGHT.findall(text)
        text = THOUGHT.sub("", text)
    items: list[dict[str, Any]] = []
    if thoughts:
        summary = [{"type": "summary_text", "text": thought} for thought in thoughts]
        items.append({"id": f"rs_{uuid4().hex}", "type": "reasoning", "summary": summary, "encrypted_content": None})
    calls = message.get("tool_calls") or ()
    if text or not (items or calls):
        items.append(_message(text))
    items.extend(_function_call(call) for call in calls)
    if message.get("prompt_token_ids") is not None:
        last = items[-1]
        for key in TOKEN_FIELDS:
            last[key] = message[key]
        if message.get("routed_experts") is not None:
            last["routed_experts"] = message["routed_experts"]
    return items


def _message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
    return {
        "id": f"msg_{uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _function_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": call["id"],
        "type": "function_call",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
        "status": "completed",
    }


def usage(told: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What the endpoint did not count stays null."""
    if not told:
        return None
    read, written = told.get("prompt_tokens") or 0, told.get("completion_tokens") or 0
    cached = (told.get("prompt_tokens_details") or {}).get("cached_tokens")
    reasoned = (told.get("completion_tokens_details") or {}).get("reasoning_tokens")
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": reasoned},
        "total_tokens": read + written,
    }
