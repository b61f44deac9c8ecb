"""Fields that a collection adds to a row from its captured calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired, TypedDict

import orjson

from palestra.gym.models.capture import CapturedRecords
from palestra.util.json_types import JsonMapping, JsonPayload

SUMMED = ("tokens_in", "tokens_out", "tokens_reasoning", "tokens_total", "latency_total_ms")


class CapturedToolCall(TypedDict):
    call_id: object
    name: object
    arguments: object


class CallUsage(TypedDict):
    tokens_in: int | None
    tokens_out: int | None
    tokens_reasoning: int | None
    tokens_total: int | None
    cache_hit: bool | None
    cached_tokens: int | None
    cache_creation_tokens: int | None


class CallRecord(CallUsage):
    """A call without its bodies."""

    model_call_id: str | None
    response_id: str | None
    call_index: int
    model_ref: JsonMapping | None
    model: str | None
    dialect: str | None
    status_code: int | None
    finish_reason: str | None
    started_at: float | None
    completed_at: float | None
    tool_calls: list[CapturedToolCall]
    reasoning_content: str | None
    error_category: str | None
    latency_total_ms: float | None
    latency_ttft_ms: float | None


class CaptureGap(TypedDict):
    """What is missing, and why."""

    code: str
    detail: NotRequired[str]


class ModelCallCapture(TypedDict):
    """A row's `ng_model_call_capture`."""

    rollout_id: str
    metrics: Mapping[str, float | None]
    calls: list[CallRecord]
    gaps: NotRequired[list[CaptureGap]]


def model_call_capture(rollout_id: str, kept: CapturedRecords) -> ModelCallCapture:
    """Returns a row's `ng_model_call_capture`. Requests and answers stay in their file."""
    calls = [call_record(line, index) for index, line in enumerate(kept.lines)]
    capture: ModelCallCapture = {"rollout_id": rollout_id, "metrics": _metrics(calls), "calls": calls}
    gaps = _gaps(kept)
    if gaps:
        capture["gaps"] = gaps
    return capture


def trajectory(task_id: str, rollout_id: str, kept: CapturedRecords) -> JsonPayload:
    """Returns a row's `ng_trajectory`: the calls of one agent in the order they were answered."""
    calls = [call_record(line, index) for index, line in enumerate(kept.lines)]
    answered = [call for call in calls if call["error_category"] is None]
    turns = [
        {"turn_index": index, "model_call_id": call["model_call_id"], "tool_calls": call["tool_calls"]}
        for index, call in enumerate(answered)
    ]
    refs = [{"model_call_id": call["model_call_id"]} for call in calls]
    return {
        "task_id": task_id,
        "rollout_id": rollout_id,
        "invocations": [{"invocation_id": "root", "parent_invocation_id": None, "model_calls": refs}],
        "turns": turns,
        "model_calls": calls,
        "tool_calls": [{"model_call_id": turn["model_call_id"], **one} for turn in turns for one in turn["tool_calls"]],
        "gaps": _gaps(kept),
    }


def call_record(line: JsonMapping, index: int) -> CallRecord:
    """Returns one call without its bodies."""
    response = line.get("response") or {}
    usage = _usage(response.get("usage") or {})
    tool_calls, reasoning = _message_text(response)
    return {
        "model_call_id": line.get("model_call_id"),
        "response_id": response.get("id"),
        "call_index": index,
        "model_ref": line.get("model_ref"),
        "model": response.get("model") or (line.get("request") or {}).get("model"),
        "dialect": line.get("dialect"),
        "status_code": line.get("status_code"),
        "finish_reason": _finish(response),
        "started_at": line.get("started_at"),
        "completed_at": line.get("completed_at"),
        **usage,
        "tool_calls": tool_calls,
        "reasoning_content": "\n".join(reasoning) or None,
        "error_category": line.get("error_category"),
        "latency_total_ms": line.get("latency_ms"),
        "latency_ttft_ms": line.get("latency_ttft_ms"),
    }


def _metrics(calls: list[CallRecord]) -> Mapping[str, float | None]:
    sums: dict[str, float | None] = {}
    for key in SUMMED:
        known = [count for call in calls if (count := call[key]) is not None]
        sums[key] = sum(known) if known else None
    return sums | {"num_calls": len(calls)}


def _gaps(kept: CapturedRecords) -> list[CaptureGap]:
    gaps: list[CaptureGap] = []
    if kept.damaged:
        gaps.append({"code": "model_call_capture_records_unreadable", "detail": f"count={kept.damaged}"})
    if kept.is_incomplete:
        gaps.append({"code": "model_call_capture_incomplete"})
    elif not kept.lines and not kept.damaged:
        gaps.append({"code": "model_call_capture_no_records"})
    return gaps


def _usage(usage: JsonMapping) -> CallUsage:
    """Converts usage: the three APIs count in three ways; Anthropic's input excludes what was cached."""
    read = usage.get("input_tokens", usage.get("prompt_tokens"))
    written = usage.get("output_tokens", usage.get("completion_tokens"))
    cache_read, cache_made = usage.get("cache_read_input_tokens"), usage.get("cache_creation_input_tokens")
    if cache_read is not None or cache_made is not None:
        read = (read or 0) + (cache_read or 0) + (cache_made or 0)
    total = usage.get("total_tokens")
    if total is None and read is not None and written is not None:
        total = read + written
    inputs = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    outputs = usage.get("output_tokens_details") or usage.get("completion_tokens_details") or {}
    cached = inputs.get("cached_tokens", cache_read)
    return {
        "tokens_in": read,
        "tokens_out": written,
        "tokens_reasoning": outputs.get("reasoning_tokens"),
        "tokens_total": total,
        "cache_hit": None if cached is None else cached > 0,
        "cached_tokens": cached,
        "cache_creation_tokens": cache_made,
    }


def _finish(response: JsonMapping) -> str | None:
    choices = response.get("choices") or [{}]
    incomplete = response.get("incomplete_details") or {}
    return response.get("stop_reason") or choices[0].get("finish_reason") or incomplete.get("reason")


def _message_text(response: JsonMapping) -> tuple[list[CapturedToolCall], list[str]]:
    """Returns tool calls and reasoning."""
    calls: list[CapturedToolCall] = []
    reasoning: list[str] = []
    for item in response.get("output") or ():
        if item["type"] == "function_call":
            calls.append(_call(item.get("call_id"), item.get("name"), item.get("arguments")))
        elif item["type"] == "reasoning":
            reasoning += [one["text"] for one in item.get("summary") or ()]
    for choice in response.get("choices") or ():
        message = choice.get("message") or {}
        functions = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
        calls += [_call(call_id, one["name"], one["arguments"]) for call_id, one in functions]
        thought = message.get("reasoning_content") or message.get("reasoning")
        reasoning += [thought] if thought else []
    for block in response.get("content") or ():
        if block["type"] == "tool_use":
            calls.append(_call(block["id"], block["name"], block["input"]))
        elif block["type"] == "thinking":
            reasoning.append(block["thinking"])
    return calls, reasoning


def _call(call_id: object, name: object, arguments: object) -> CapturedToolCall:
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except ValueError:
            arguments = {"_raw": arguments}
    return {"call_id": call_id, "name": name, "arguments": arguments}
