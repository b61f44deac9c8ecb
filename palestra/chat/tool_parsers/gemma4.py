"""`<|channel>thought\n…<channel|>` and `<|tool_call>call:name{…}<tool_call|>`: answers of Gemma 4."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from palestra.chat.errors import ChatError
from palestra.chat.output_parser import ReasoningParser
from palestra.chat.tag_scanner import Tags
from palestra.chat.tool_calls import ParsedCall
from palestra.chat.tool_parsers import lark
from palestra.chat.tool_parsers.gemma4_values import QUOTE, argument_rules, read_arguments
from palestra.chat.tool_parsers.protocol import AnswerStart, ToolCallBlock, ToolCallReader
from palestra.util.json_types import JsonMapping

TURN, END_TURN = "<|turn>", "<turn|>"
CHANNEL, END_CHANNEL = "<|channel>", "<channel|>"
THOUGHT = "thought"
CALL, END_CALL = "<|tool_call>", "<tool_call|>"
RESPONSE = "<|tool_response>"
_HEAD = re.compile(r"\s*call:(?P<name>[^\s{}:<>]+)\s*(?=\{)")


class Gemma4Format:
    name = "gemma4"
    tags = (CHANNEL, END_CHANNEL, CALL, END_CALL, QUOTE)
    stops = (END_TURN, RESPONSE)

    def start(self, prompt_end: str) -> AnswerStart:
        answer = prompt_end.rpartition(TURN)[2]
        return AnswerStart.IN_THOUGHT if answer.rfind(CHANNEL) > answer.rfind(END_CHANNEL) else AnswerStart.FRESH

    def parser(self, *, start: AnswerStart, reads_calls: bool) -> ReasoningParser:
        return ReasoningParser(
            Gemma4Calls() if reads_calls else None,
            in_thought=start is AnswerStart.IN_THOUGHT,
            thought_tags=(CHANNEL + THOUGHT, END_CHANNEL),
        )

    def grammar(self, tools: Sequence[JsonMapping], *, parallel: bool, special: Mapping[str, int]) -> str:
        opening, closing = lark.tag(CALL, special), lark.tag(END_CALL, special)
        return lark.grammar(
            [f"calls: calls_block{'+' if parallel else ''}", f"calls_block: {opening} calls_one {closing}"],
            tools,
            lambda name, arguments: f"{lark.literal('call:' + name)} {arguments}",
            lambda rule, parameters: argument_rules(rule, parameters, special),
        )

    def layout(self, top: str, *, start: AnswerStart, special: Mapping[str, int]) -> str:
        missing = [text for text in (CHANNEL, END_CHANNEL) if text not in special]
        if missing:
            raise ChatError(f"{missing[0]} is no token of this model's tokenizer, so its answers cannot be bound")
        channel, end = lark.tag(CHANNEL, special), lark.tag(END_CHANNEL, special)
        thought = {
            AnswerStart.FRESH: rf'({channel} "{THOUGHT}\n" text? {end})?',
            AnswerStart.IN_THOUGHT: f"text? {end}",
            AnswerStart.IN_TEXT: "",
        }[start]
        body = top.replace("text_or_calls", "text? calls?")
        return f"start: {thought} ({body})\ntext: TEXT\nTEXT: /(?s:.+)/\n"


class Gemma4Calls:
    """The calls of the format, as `ReasoningParser` searches for them."""

    name = "gemma4"
    markers = (CALL,)
    openings = ()
    tags = Gemma4Format.tags

    def block(self, marker: str) -> ToolCallReader:
        return _Reader()

    def grammar(self, tools: Sequence[JsonMapping], *, parallel: bool, special: Mapping[str, int]) -> str:
        return Gemma4Format().grammar(tools, parallel=parallel, special=special)


class _Reader:
    """Reads one call. It ends with its closing token, unless that stands in a string."""

    def __init__(self) -> None:
        self._read: list[str] = []
        self._rest = ""
        self._in_string = False

    def feed(self, text: str) -> ToolCallBlock | None:
        return self._scan(text, at_end=False)

    def finish(self) -> ToolCallBlock:
        return self._scan("", at_end=True) or self._ended("", "")

    def _scan(self, text: str, at_end: bool) -> ToolCallBlock | None:
        self._rest += text
        while True:
            found = (_IN_STRING if self._in_string else _OUTSIDE).find(self._rest, at_end)
            self._take(found.start)
            if found.tag is None:
                return None
            if found.tag == END_CALL:
                return self._ended(END_CALL, self._rest[len(END_CALL) :])
            self._in_string = not self._in_string
            self._take(len(QUOTE))

    def _take(self, length: int) -> None:
        self._read.append(self._rest[:length])
        self._rest = self._rest[length:]

    def _ended(self, closing: str, rest: str) -> ToolCallBlock:
        text = "".join(self._read)
        head = _HEAD.match(text)
        arguments = None if head is None else read_arguments(text[head.end() :])
        if head is None or arguments is None:
            return ToolCallBlock(text=text + closing, rest=rest)
        return ToolCallBlock(calls=[ParsedCall(name=head["name"], arguments=arguments)], rest=rest)


_IN_STRING, _OUTSIDE = Tags((QUOTE,)), Tags((QUOTE, END_CALL))
