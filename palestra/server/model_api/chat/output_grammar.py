"""What an answer must look like, as a grammar: a format, calls of tools, and the thinking before them.

Owns: how they go together. Never touches: how grammars are followed.
"""

from __future__ import annotations

import msgspec

from palestra.chat import ChatError, ChatTokenizer
from palestra.chat.answer_grammars import text_or_calls, thinking
from palestra.chat.tool_parsers import ToolParser
from palestra.server.model_api.chat.response_formats import check_size, content_format
from palestra.server.model_api.chat.schemas import ChatRequest, SamplingFields
from palestra.server.model_api.chat.tool_choices import ToolChoice, tool_choice_of
from palestra.server.model_api.errors import invalid
from palestra.types import Grammar, GrammarKind


def chat_grammar(call: ChatRequest, tokenizer: ChatTokenizer, tools: ToolParser, *, in_thought: bool) -> Grammar | None:
    """`in_thought`: the prompt ends inside a think block. None: whatever the model says will do."""
    content, choice = content_format(call), tool_choice_of(call)
    if content is not None and choice is not None:
        _refuse_both(choice, tools)
    if content is None and (choice is None or choice.is_free):
        return None
    top, rules = "@answer", ""
    if choice is not None:
        check_size("tools", list(choice.tools))
        top = "calls" if choice.is_required else "text_or_calls" if content is None else "(calls | @answer)"
        rules = _calls(choice, tokenizer, tools)
    if top == "text_or_calls":
        rules += text_or_calls(tokenizer, tools)
    if in_thought or (tokenizer.thinks and _may_think(call)):
        top, rules = f"thinking {top}", rules + thinking(tokenizer, is_open=in_thought)
    whole = f"start: {top}\n{rules}"
    if content is None:
        return Grammar(kind=GrammarKind.LARK, text=whole, is_wide=True, asked_by="tools")
    asked_by = content.asked_by if choice is None else ""  # either may be what is wrong
    return msgspec.structs.replace(content, around=whole, asked_by=asked_by) if rules else content


def text_grammar(call: SamplingFields) -> Grammar | None:
    return content_format(call)


def _calls(choice: ToolChoice, tokenizer: ChatTokenizer, tools: ToolParser) -> str:
    try:
        return tools.grammar(choice.tools, parallel=choice.several, special=tokenizer.special_texts)
    except ChatError as error:
        raise invalid("tools", f"tools: {error}", code="unsupported") from None


def _refuse_both(choice: ToolChoice, tools: ToolParser) -> None:
    if choice.is_required:
        raise invalid("tool_choice", "tool_choice: a call that has to be made leaves no room for a response_format")
    if tools.openings:
        raise invalid(
            "response_format",
            "response_format: this model writes its calls as JSON, too, so nothing tells them apart; "
            "send tool_choice none, or required",
        )


def _may_think(call: ChatRequest) -> bool:
    """Templates that know this name close the think block in the prompt."""
    return (call.chat_template_kwargs or {}).get("enable_thinking") is not False
