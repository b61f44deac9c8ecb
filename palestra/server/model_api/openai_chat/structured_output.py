"""The grammar of an answer: a format, tool calls, and the reasoning before them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from palestra.chat import ChatError, ChatTokenizer
from palestra.chat.answer_grammars import answer_rules
from palestra.chat.tool_parsers import AnswerFormat, AnswerStart, CallFormat
from palestra.server.model_api.errors import invalid
from palestra.server.model_api.openai_chat.response_formats import check_size, content_format
from palestra.server.model_api.openai_chat.schemas import ChatRequest, SamplingFields
from palestra.server.model_api.openai_chat.tool_choices import ToolChoice, tool_choice_of
from palestra.types import Grammar, GrammarKind


def chat_grammar(call: ChatRequest, tokenizer: ChatTokenizer, start: AnswerStart) -> Grammar | None:
    """Returns the grammar; None: any answer is allowed."""
    tools = tokenizer.tool_format
    content, choice = content_format(call), tool_choice_of(call)
    if content is not None and choice is not None:
        _refuse_both(choice, tools)
    if content is None and (choice is None or choice.is_free):
        return None
    top, rules = "@answer", ""
    if choice is not None:
        check_size("tools", list(choice.tools))
        top = "calls" if choice.is_required else "text_or_calls" if content is None else "(calls | @answer)"
        rules = _refused(lambda: tools.grammar(choice.tools, parallel=choice.several, special=tokenizer.special_texts))
    if isinstance(tools, AnswerFormat):
        whole = rules + _refused(lambda: tools.layout(top, start=start, special=tokenizer.special_texts))
    else:
        whole = rules + answer_rules(tokenizer, tools, top, start=start, may_think=_may_think(call))
    if content is None:
        return Grammar(kind=GrammarKind.LARK, text=whole, is_wide=True, asked_by="tools")
    asked_by = content.asked_by if choice is None else ""  # if both are set, either may be the cause of an error
    is_whole = whole == "start: @answer\n"
    return content if is_whole else msgspec.structs.replace(content, around=whole, asked_by=asked_by)


def refuse_unknown_format(call: ChatRequest, tokenizer: ChatTokenizer) -> None:
    """Refuses to demand calls in a format that could not be parsed."""
    if call.calls_tools and tokenizer.unknown_format:
        raise invalid("tools", f"tools: {' '.join(tokenizer.unknown_format.split())}", code="unsupported")


def text_grammar(call: SamplingFields) -> Grammar | None:
    return content_format(call)


def _refused(grammar: Callable[[], str]) -> str:
    try:
        return grammar()
    except ChatError as error:
        raise invalid("tools", f"tools: {error}", code="unsupported") from None


def _refuse_both(choice: ToolChoice, tools: CallFormat) -> None:
    if choice.is_required:
        raise invalid(
            "tool_choice", "tool_choice: a required call cannot be combined with a response_format; send one of them"
        )
    if not isinstance(tools, AnswerFormat) and tools.openings:
        raise invalid(
            "response_format",
            "response_format: this model also writes its calls as JSON, so the two cannot be told apart; "
            "send tool_choice none or required",
        )


def _may_think(call: ChatRequest) -> bool:
    """Whether the answer may have a think block: templates that know this argument close the block in the prompt."""
    return (call.chat_template_kwargs or {}).get("enable_thinking") is not False
