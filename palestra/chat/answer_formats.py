"""Chooses how an answer is parsed, whichever format its model writes."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.chat.output_parser import ReasoningParser
from palestra.chat.tokenizer import ChatTokenizer
from palestra.chat.tool_calls import END_THINK, THINK
from palestra.chat.tool_parsers import AnswerFormat, AnswerStart, CallFormat, OutputParser, for_tools
from palestra.util.json_types import JsonMapping

OPENING = 32  # tokens at the end of a prompt that may open a think block, or a message


def output_parser(
    form: CallFormat, tools: Sequence[JsonMapping] | None, start: AnswerStart = AnswerStart.FRESH
) -> OutputParser:
    """`tools` are those that can be called, in OpenAI's format; None: no calls are searched for."""
    if isinstance(form, AnswerFormat):
        return form.parser(start=start, reads_calls=tools is not None)
    bound = None if tools is None else for_tools(form, tools)
    return ReasoningParser(bound, in_thought=start is AnswerStart.IN_THOUGHT)


def answer_start(tokenizer: ChatTokenizer, prompt: Sequence[int], begun: int) -> AnswerStart:
    """Finds the start by the end of the prompt; if an answer is continued, by its beginning, which is the last `begun`
    tokens of the prompt."""
    split = len(prompt) - begun
    before = tokenizer.decode(prompt[max(0, split - OPENING) : split], skip_special=False)
    beginning = tokenizer.decode(prompt[split:], skip_special=False)
    if isinstance(tokenizer.tool_format, AnswerFormat):
        return tokenizer.tool_format.start(before + beginning)
    text = THINK + beginning if before.rstrip().endswith(THINK) else beginning
    return AnswerStart.IN_THOUGHT if text.rfind(THINK) > text.rfind(END_THINK) else AnswerStart.FRESH
