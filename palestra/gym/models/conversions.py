"""Converts a Responses request to a chat request, and a chat answer to a response."""

from __future__ import annotations

import re
from typing import TypedDict

from palestra.chat import responses_output as written
from palestra.chat.responses_input import (
    ChatDialect,
    ItemError,
    chat_format,
    chat_messages,
    chat_tool_choice,
    chat_tools,
)
from palestra.chat.responses_output import call_item, ending, message_item, new_id, reasoning_item, text_part
from palestra.gym.errors import BadRequest
from palestra.types.gym import ROUTED_EXPERTS, TOKEN_FIELDS
from palestra.types.openai import (
    ChatBody,
    ChatCompletion,
    ChatTool,
    ChatUsage,
    ModelResponse,
    ResponseItem,
    ResponsesParams,
    ResponseUsage,
)
from palestra.types.rollouts import Message

SAME = ("metadata", "service_tier", "store", "temperature", "top_p", "user")
"""Fields that both APIs have under the same name."""


def chat_request(params: ResponsesParams, *, with_ids: bool) -> ChatBody:
    """Converts `params`, as `requests.checked` returns them; the caller adds the model's name. Raises BadRequest."""
    try:
        found = chat_messages(params["input"], params.get("instructions"), ChatDialect.PLAIN, with_ids=with_ids)
        tool_fields = _tools(params)
    except ItemError as e:
        place = e.place if e.field is None else (*e.place, e.field)
        raise BadRequest(place, str(e), given=e.given) from None
    body: ChatBody = {"messages": [one.message for one in found]}
    for key in SAME:
        if key in params:
            body[key] = params[key]
    if "max_output_tokens" in params:
        body["max_tokens"] = params["max_output_tokens"]
    if params.get("top_logprobs"):
        body["logprobs"], body["top_logprobs"] = True, params["top_logprobs"]
    effort = params.get("reasoning", {}).get("effort")
    if effort is not None:
        body["reasoning_effort"] = effort
    response_format = chat_format(params.get("text", {}).get("format"))
    whole: ChatBody = {**body, **tool_fields}
    if response_format is not None:
        whole["response_format"] = response_format
    return whole


class ChatToolFields(TypedDict, total=False):
    tools: list[ChatTool]
    tool_choice: object
    parallel_tool_calls: bool


def _tools(params: ResponsesParams) -> ChatToolFields:
    tools, choice = params.get("tools"), params.get("tool_choice")
    if not tools:
        if choice == "required":
            raise ItemError(("tool_choice",), "tool_choice='required' requires at least one tool")
        return {}
    chosen: ChatToolFields = {"tools": chat_tools(tools, without=["strict"])}
    nameless = next((at for at, one in enumerate(chosen["tools"]) if "name" not in one["function"]), None)
    if nameless is not None:
        raise ItemError(("tools", nameless), "a function needs a name")
    if choice is not None:
        chosen["tool_choice"] = chat_tool_choice(choice, ChatDialect.PLAIN)
    if "parallel_tool_calls" in params:
        chosen["parallel_tool_calls"] = params["parallel_tool_calls"]
    return chosen


THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def response(params: ResponsesParams, completion: ChatCompletion, *, model: str, has_thoughts: bool) -> ModelResponse:
    """`completion` has its reasoning in think tags and its ids on the message; only its first choice counts."""
    choice = completion["choices"][0]
    created = completion.get("created")
    return written.response_body(
        params,
        model=model,
        created_at=float(created) if created else None,
        output=output_items(choice["message"], has_thoughts=has_thoughts),
        usage=usage(completion.get("usage")),
        **ending(INCOMPLETE.get(choice.get("finish_reason") or "")),
    )


def output_items(message: Message, *, has_thoughts: bool) -> list[ResponseItem]:
    """Returns reasoning, text, calls, in this order, with ids on the last of them."""
    text = message.get("content") or ""
    thoughts: list[str] = []
    if has_thoughts and "<think>" in text:
        thoughts = THOUGHT.findall(text)
        text = THOUGHT.sub("", text)
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
    items = written.output_items(
        reasoning_item(new_id("rs"), thoughts) if thoughts else None,
        message_item(new_id("msg"), [text_part(text)]),
        [call_item(call_id, function["name"], function["arguments"]) for call_id, function in calls],
        has_text=bool(text),
    )
    if message.get("prompt_token_ids") is not None:
        for key in TOKEN_FIELDS:
            items[-1][key] = message[key]
        if message.get(ROUTED_EXPERTS) is not None:
            items[-1][ROUTED_EXPERTS] = message[ROUTED_EXPERTS]
    return items


def usage(usage_there: ChatUsage | None) -> ResponseUsage | None:
    if not usage_there:
        return None
    cached = (usage_there.get("prompt_tokens_details") or {}).get("cached_tokens")
    reasoned = (usage_there.get("completion_tokens_details") or {}).get("reasoning_tokens")
    read, generated = usage_there.get("prompt_tokens") or 0, usage_there.get("completion_tokens") or 0
    return written.usage_body(read, generated, cached=cached, reasoned=reasoned)
