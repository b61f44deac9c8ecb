"""Converts a Messages call to a chat call.

Owns: which field becomes which. Never touches: HTTP, sampling.
"""

from __future__ import annotations

from typing import Any

from palestra.chat import ChatTokenizer
from palestra.server.core.wire_errors import shown
from palestra.server.model_api.chat.schemas import ChatRequest
from palestra.server.model_api.errors import parse_fields
from palestra.server.model_api.messages.errors import wrong
from palestra.server.model_api.messages.messages import read_conversation
from palestra.server.model_api.messages.schemas import NOT_HERE, AnthropicToolChoice, CountRequest, MessagesRequest
from palestra.util.json_types import JsonObject

THINKING = "enable_thinking"
"""The template argument for it."""
TOOL_FIELDS: dict[str, tuple[Any, ...]] = {
    "type": ("custom",),
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "input_examples": ([],),
}
"""Fields of tools that are not supported, with the values that request nothing (as null always does)."""


def chat_request(call: MessagesRequest) -> ChatRequest:
    given = {
        **_shared(call),
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
    return parse_fields(ChatRequest, {name: value for name, value in given.items() if value is not None})


def counted_request(call: CountRequest) -> ChatRequest:
    return parse_fields(ChatRequest, _shared(call))


def check_thinking(call: CountRequest, tokenizer: ChatTokenizer) -> None:
    if THINKING in _template_kwargs(call) and call.thinking is not None and not tokenizer.template_knows(THINKING):
        raise wrong(
            "thinking",
            f"this model's chat template has no {THINKING}, so type {call.thinking.type!r} would change nothing; "
            'leave it out, or send {"type": "adaptive"}',
        )


def _shared(call: CountRequest) -> JsonObject:
    """Returns the shared fields, including those of other APIs that were sent: a chat call knows them, or ignores
    them."""
    messages = read_conversation(call.system, call.messages)
    others = {name: value for name, value in (call.model_extra or {}).items() if name not in NOT_HERE}
    fields: JsonObject = {**others, "model": call.model, "messages": messages}
    if call.tools:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(call.tools)]
    if kwargs := _template_kwargs(call):
        fields["chat_template_kwargs"] = kwargs
    if messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            raise wrong("messages", "the last message calls tools; send their tool_result blocks after it")
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return fields


def _template_kwargs(call: CountRequest) -> JsonObject:
    kwargs = dict(call.chat_template_kwargs or {})
    if call.thinking is None or call.thinking.type == "adaptive":
        return kwargs
    enabled = call.thinking.type == "enabled"
    if kwargs.setdefault(THINKING, enabled) != enabled:
        raise wrong("thinking", f"chat_template_kwargs.{THINKING} says the opposite; send one of them")
    return kwargs


def _tool(given: JsonObject, where: str) -> JsonObject:
    for name, harmless in TOOL_FIELDS.items():
        value = given.get(name)
        if value is not None and value not in harmless:
            raise wrong(
                where,
                f"{name}: {shown(value)} is not supported; tools are run by the client, and the model sees all of them",
            )
    if not isinstance(given.get("input_schema"), dict):
        raise wrong(where, f"input_schema is {shown(given.get('input_schema'))}; it must be a JSON schema")
    function = {"name": given.get("name")}
    if given.get("description") is not None:
        function["description"] = given["description"]
    function["parameters"] = given["input_schema"]
    if given.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(given: AnthropicToolChoice) -> JsonObject:
    choices: JsonObject = {"auto": "auto", "none": "none", "any": "required"}
    named = {"type": "function", "function": {"name": given.name}}
    choice = {"tool_choice": choices.get(given.type, named)}
    return choice | ({"parallel_tool_calls": False} if given.disable_parallel_tool_use else {})
