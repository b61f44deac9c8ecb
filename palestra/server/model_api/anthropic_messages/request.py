"""Converts a Messages call to a chat call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from palestra.chat import ChatTokenizer
from palestra.net.chat_apis.anthropic_format import TOOL_CHOICES
from palestra.server.core.wire_errors import shown
from palestra.server.model_api.anthropic_messages.conversation import read_conversation
from palestra.server.model_api.anthropic_messages.errors import wrong
from palestra.server.model_api.anthropic_messages.schemas import AnthropicToolChoice, CountRequest, MessagesRequest
from palestra.server.model_api.anthropic_messages.tools import read_tools, with_references
from palestra.server.model_api.errors import parse_fields
from palestra.server.model_api.hosted_tools import ToolSettings
from palestra.server.model_api.openai_chat.schemas import ChatRequest
from palestra.server.model_api.request_fields import MESSAGES
from palestra.util.json_types import JsonObject

THINKING = "enable_thinking"
"""The template argument for it."""
ADAPTIVE = "adaptive"
EDITS = "context_management"
"""The field with edits: what a server would take out of a conversation before the model reads it."""
THINKING_EDIT = "clear_thinking_20251015"
KEEP_ALL: tuple[Any, ...] = ("all", {"type": "all"})


@dataclass(frozen=True, slots=True)
class TranslatedMessages:
    chat: ChatRequest
    ignored: list[str]


def chat_request(call: MessagesRequest, settings: ToolSettings) -> TranslatedMessages:
    shared = _shared(call, settings)
    given = {
        **shared.fields,
        **(_choice(call.tool_choice) if call.tool_choice is not None else {}),
        "max_tokens": call.max_tokens,
        "stop": call.stop_sequences,
        "return_token_ids": call.return_token_ids,
        "logprobs": call.return_token_ids,
    }
    if call.metadata is not None:
        given |= {"metadata": call.metadata.model_dump(), "user": call.metadata.user_id}
    if call.format is not None:
        schema = {"name": "answer", "schema": call.format.schema_, "strict": True}
        given["response_format"] = {"type": "json_schema", "json_schema": schema}
    if call.output_config is not None:
        given["reasoning_effort"] = call.output_config.effort
    chat = parse_fields(ChatRequest, {name: value for name, value in given.items() if value is not None})
    return TranslatedMessages(chat, [*call.ignored(), *chat.ignored(), *shared.ignored])


def counted_request(call: CountRequest, settings: ToolSettings) -> ChatRequest:
    return parse_fields(ChatRequest, _shared(call, settings).fields)


def ignores_thinking(call: CountRequest, tokenizer: ChatTokenizer) -> bool:
    """Whether the call turns thinking on or off and the template cannot."""
    return call.thinking is not None and call.thinking.type != ADAPTIVE and not tokenizer.template_knows(THINKING)


class _Shared(NamedTuple):
    fields: JsonObject
    ignored: list[str]


def _shared(call: CountRequest, settings: ToolSettings) -> _Shared:
    """Returns the shared fields, including those of other APIs that were sent: a chat call knows what becomes of
    them."""
    _check_edits(call.context_management)
    tools = read_tools(call.tools or [], settings)
    given, referred = with_references(call.messages, tools)
    messages = read_conversation(call.system, given)
    others = {name: value for name, value in (call.model_extra or {}).items() if name not in MESSAGES}
    fields: JsonObject = {**others, "model": call.model, "messages": messages}
    if tools.listed:
        fields["tools"] = tools.listed
    if referred:
        fields["deferred_tools"] = list(referred.values())
    if kwargs := _template_kwargs(call):
        fields["chat_template_kwargs"] = kwargs
    if messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            raise wrong("messages", "the last message calls tools; send their tool_result blocks after it")
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return _Shared(fields, tools.ignored)


def _template_kwargs(call: CountRequest) -> JsonObject:
    kwargs = dict(call.chat_template_kwargs or {})
    if call.thinking is None or call.thinking.type == ADAPTIVE:
        return kwargs
    enabled = call.thinking.type == "enabled"
    if kwargs.setdefault(THINKING, enabled) != enabled:
        raise wrong("thinking", f"chat_template_kwargs.{THINKING} says the opposite; send one of them")
    return kwargs


def _choice(given: AnthropicToolChoice) -> JsonObject:
    named = {"type": "function", "function": {"name": given.name}}
    choice: JsonObject = {"tool_choice": TOOL_CHOICES.get(given.type, named)}
    return choice | ({"parallel_tool_calls": False} if given.disable_parallel_tool_use else {})


def _check_edits(given: JsonObject | None) -> None:
    """Raises a refusal for an edit that would take something out."""
    if others := sorted((given or {}).keys() - {"edits"}):
        raise wrong(EDITS, f"{shown(others[0])} is not supported; it takes edits alone", code="unsupported")
    edits = (given or {}).get("edits") or []
    if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
        raise wrong(f"{EDITS}.edits", "it must be a list of edits")
    for i, edit in enumerate(edits):
        where, kind = f"{EDITS}.edits[{i}]", edit.get("type")
        if kind != THINKING_EDIT:
            detail = f"an edit of type {shown(kind)} is not supported; clear or compact the conversation at the client"
            raise wrong(where, detail, code="unsupported")
        if edit.get("keep") not in KEEP_ALL:
            kept = shown(edit["keep"]) if "keep" in edit else "missing"
            detail = f'keep is {kept}; what was sampled stays in the conversation, so send "all"'
            raise wrong(where, detail, code="unsupported")
