"""Converts a call of `/v1/responses` to a chat call, and its errors back to this API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

from palestra.chat.responses_input import (
    ChatDialect,
    FieldPath,
    Item,
    ItemError,
    LocatedMessage,
    chat_format,
    chat_messages,
    chat_tool_choice,
    chat_tools,
)
from palestra.server.core.errors import ApiError
from palestra.server.core.wire_errors import shown
from palestra.server.model_api.errors import invalid, parse_fields
from palestra.server.model_api.hosted_tools import ToolSettings
from palestra.server.model_api.openai_chat.schemas import ChatRequest
from palestra.server.model_api.openai_responses.compaction import as_messages, is_compaction
from palestra.server.model_api.openai_responses.schemas import NOT_HANDED_ON, ResponsesRequest
from palestra.server.model_api.openai_responses.tools import ResponseTools, as_functions, chosen_function, read_tools
from palestra.server.model_api.request_fields import OUTPUT_LOGPROBS
from palestra.types.openai import ChatTool
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping, JsonPayload

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
NOT_OF_FUNCTIONS: dict[str, tuple[Any, ...]] = {"async": (False,), "allowed_callers": (["direct"],)}
"""Properties of OpenAI's functions that are not supported, with the values that request nothing."""
NOT_SHOWN = ("defer_loading",)
"""Without OpenAI's search for tools, all of them are shown from the beginning."""
FORMATS = ("text", "json_object", "json_schema")
_ONE_MESSAGE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class TranslatedRequest:
    chat: ChatRequest
    places: Sequence[str]
    """The place in the request from which each of its messages came."""
    tools: ResponseTools
    ignored: list[str]


def chat_request(call: ResponsesRequest, settings: ToolSettings, history: Sequence[Message] = ()) -> TranslatedRequest:
    """`history`: the messages up to the previous response."""
    found = read_input(as_messages(as_functions(call.input)), call.instructions, history)
    tools = read_tools(call.tools or [], settings)
    given = call.model_dump(exclude_unset=True, exclude=NOT_HANDED_ON)
    ours = {
        "messages": found.messages,
        "max_completion_tokens": call.max_output_tokens,
        "response_format": _format(call.text or {}),
        "reasoning_effort": (call.reasoning or {}).get("effort"),
        **_tools(call, tools),
        **_logprobs(call),
    }
    with translate_errors(found.places):
        chat = parse_fields(ChatRequest, given | {name: value for name, value in ours.items() if value is not None})
    ignored = [*call.ignored(), *chat.ignored(), *tools.ignored, *_not_included(call)]
    return TranslatedRequest(chat, found.places, tools, ignored)


@contextmanager
def translate_errors(places: Sequence[str]) -> Iterator[None]:
    """Turns a refusal of the chat call into one that names the fields and places of this request."""
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


# Input


@dataclass(frozen=True, slots=True)
class MessageOrigins:
    """Messages, and the place in the request from which each came."""

    messages: list[Message]
    places: list[str]


def read_input(
    given: str | Sequence[Item], instructions: str | None, history: Sequence[Message] = ()
) -> MessageOrigins:
    """`history`: messages before the input."""
    before = [LocatedMessage(message, ("previous_response_id",)) for message in history]
    with _refusing_items():
        found = chat_messages(given, instructions, ChatDialect.OURS, before=before)
    return MessageOrigins([one.message for one in found], [_written(one.place) for one in found])


@contextmanager
def _refusing_items() -> Iterator[None]:
    """Turns an item that cannot be expressed in a chat into a refusal."""
    try:
        yield
    except ItemError as error:
        place = _written(error.place)
        raise invalid(place, f"{place}: {error}", code="unsupported" if error.is_unsupported else None) from None


def _written(place: FieldPath) -> str:
    """Formats a place, e.g. `input[3].content[0]`."""
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in place).removeprefix(".")


# Fields


class ToolFields(TypedDict, total=False):
    tools: list[ChatTool]
    tool_choice: object
    parallel_tool_calls: bool | None


def _tools(call: ResponsesRequest, tools: ResponseTools) -> ToolFields:
    """Converts the tools. Without tools, nothing may be said about choosing them; to require a call is an error."""
    if not tools.functions:
        if call.tool_choice not in (None, "auto", "none"):
            raise invalid(
                "tool_choice", f"tool_choice: {shown(call.tool_choice)} needs tools that the client runs itself"
            )
        return {}
    for i, tool in enumerate(tools.functions):
        for name, harmless in NOT_OF_FUNCTIONS.items():
            if (value := tool.get(name)) is not None and value not in harmless:
                where = f"tools[{i}].{name}"
                raise invalid(where, f"{where}: {shown(value)} is not supported; leave it out", code="unsupported")
    choice = chosen_function(call.tool_choice)
    with _refusing_items():
        return {
            "tools": chat_tools(tools.functions, without=(*NOT_OF_FUNCTIONS, *NOT_SHOWN)),
            "tool_choice": "none" if is_compaction(call.input) else chat_tool_choice(choice, ChatDialect.OURS),
            "parallel_tool_calls": call.parallel_tool_calls,
        }


def _format(text: JsonMapping) -> JsonPayload | None:
    given = text.get("format")
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in FORMATS:
        raise invalid("text.format", f"text.format: {shown(given)}; its type must be {', '.join(FORMATS)}")
    return chat_format(given)


def _logprobs(call: ResponsesRequest) -> JsonPayload:
    if call.wants_logprobs:
        return {"logprobs": True, "top_logprobs": call.top_logprobs}
    if call.top_logprobs:
        raise invalid("top_logprobs", f'top_logprobs needs include: ["{OUTPUT_LOGPROBS}"]')
    return {}


def _not_included(call: ResponsesRequest) -> list[str]:
    """Returns what is requested to be included and never is: results of tools that the server does not run."""
    return [f"include.{one}" for one in call.include or () if one not in (OUTPUT_LOGPROBS, CLEAR)]
