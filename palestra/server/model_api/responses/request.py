"""Converts a call of `/v1/responses` to a chat call, and its errors back to this API.

Owns: fields whose names or shapes differ. Never touches: items; see `items`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from palestra.chat.responses_input import ChatDialect, chat_format, chat_tool_choice, chat_tools
from palestra.server.core.errors import ApiError
from palestra.server.core.wire_errors import shown
from palestra.server.model_api.chat.schemas import ChatRequest
from palestra.server.model_api.errors import invalid, parse_fields
from palestra.server.model_api.responses.items import read_input, with_places
from palestra.server.model_api.responses.schemas import LOGPROBS, NOT_HANDED_ON, ResponsesRequest
from palestra.util.json_types import JsonObject

CLEAR = "reasoning.encrypted_content"
"""Requests reasoning that can be sent back. It is returned as plain text, so it can."""
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
"""Fields of chat completions, and their names in this API."""
NOT_OF_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "defer_loading": (False,),
    "async": (False,),
    "allowed_callers": (["direct"],),
}
"""Properties of OpenAI's functions that are not supported, with the values that request nothing."""
FORMATS = ("text", "json_object", "json_schema")
_ONE_MESSAGE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class TranslatedRequest:
    chat: ChatRequest
    places: Sequence[str]
    """The place in the request from which each of its messages came."""


def chat_request(call: ResponsesRequest) -> TranslatedRequest:
    found = read_input(call.input, call.instructions)
    given = call.model_dump(exclude_unset=True, exclude=NOT_HANDED_ON)
    ours = {
        "messages": found.messages,
        "max_completion_tokens": call.max_output_tokens,
        "response_format": _format(call.text or {}),
        "reasoning_effort": _effort(call.reasoning or {}),
        **_tools(call),
        **_logprobs(call),
    }
    with in_these_words(found.places):
        chat = parse_fields(ChatRequest, given | {name: value for name, value in ours.items() if value is not None})
    return TranslatedRequest(chat, found.places)


@contextmanager
def in_these_words(places: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        raise _renamed(error, places) from None


def _renamed(error: ApiError, places: Sequence[str]) -> ApiError:
    param = old = error.param or ""
    if (one := _ONE_MESSAGE.match(old)) is not None and int(one[1]) < len(places):
        param = places[int(one[1])] + old[one.end() :]
    elif (name := re.match(r"\w+", old)) is not None:
        param = NAMES.get(name[0], name[0]) + old[name.end() :]
    detail = param + error.detail.removeprefix(old) if old and error.detail.startswith(old) else error.detail
    return ApiError(error.status, detail, param=param or None, code=error.code, retry_after_s=error.retry_after_s)


# Fields


def _tools(call: ResponsesRequest) -> JsonObject:
    """Converts the tools. Without tools, nothing may be said about choosing them; to require a call is an error."""
    if not call.tools:
        if call.tool_choice not in (None, "auto", "none"):
            raise invalid("tool_choice", f"tool_choice: {shown(call.tool_choice)} needs tools")
        return {}
    for i, tool in enumerate(call.tools):
        for name, harmless in NOT_OF_FUNCTIONS.items():
            _only(tool, f"tools[{i}]", name, harmless, "leave it out")
    with with_places():
        return {
            "tools": chat_tools(call.tools, without=NOT_OF_FUNCTIONS),
            "tool_choice": chat_tool_choice(call.tool_choice, ChatDialect.OURS),
            "parallel_tool_calls": call.parallel_tool_calls,
        }


def _format(text: JsonObject) -> JsonObject | None:
    _only(text, "text", "verbosity", ("medium",), 'say in the instructions how much to write, or send "medium"')
    given = text.get("format")
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in FORMATS:
        raise invalid("text.format", f"text.format: {shown(given)}; its type must be {', '.join(FORMATS)}")
    return chat_format(given)


def _effort(reasoning: JsonObject) -> Any:
    in_full = ("auto", "detailed")
    for name in ("summary", "generate_summary"):
        _only(reasoning, "reasoning", name, in_full, 'reasoning is returned in full; send "auto"')
    _only(reasoning, "reasoning", "context", ("auto",), "send history: exact or template")
    _only(reasoning, "reasoning", "mode", ("standard",), 'send "standard"')
    return reasoning.get("effort")


def _only(given: JsonObject, field: str, name: str, harmless: tuple[Any, ...], advice: str) -> None:
    if (value := given.get(name)) is not None and value not in harmless:
        where = f"{field}.{name}"
        raise invalid(where, f"{where}: {shown(value)} is not supported; {advice}", code="unsupported")


def _logprobs(call: ResponsesRequest) -> JsonObject:
    if (other := next((one for one in call.include or () if one not in (LOGPROBS, CLEAR)), None)) is not None:
        raise invalid("include", f"include: {shown(other)} is not supported; {LOGPROBS} is", code="unsupported")
    if call.wants_logprobs:
        return {"logprobs": True, "top_logprobs": call.top_logprobs}
    if call.top_logprobs:
        raise invalid("top_logprobs", f'top_logprobs needs include: ["{LOGPROBS}"]')
    return {}
