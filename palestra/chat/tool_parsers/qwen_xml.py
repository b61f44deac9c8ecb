"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3.5 and later, Nemotron
3."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from palestra.chat.tool_parsers import lark
from palestra.chat.tool_parsers.protocol import ToolCallReader
from palestra.chat.tool_parsers.tagged_values import END, TaggedValuesReader, TagSyntax
from palestra.chat.tool_parsers.value_grammar import ValueSyntax, value_rules
from palestra.util.json_types import JsonMapping

CALL, FUNCTION = "<tool_call>", "<function="
END_CALL, END_FUNCTION, END_PARAMETER = "</tool_call>", "</function>", "</parameter>"


def _lines(value: str) -> str:
    """Strips the line breaks around a value, which stands on lines of its own."""
    return value.removeprefix("\n").removesuffix("\n")


def _syntax(head: str, until: str) -> TagSyntax:
    return TagSyntax(
        head=re.compile(rf"{head}(?P<name>[^<>\n]+)>"),
        between=re.compile(rf"\s*(?:<parameter=(?P<key>[^>\n]+)>|{END_FUNCTION})"),
        closing=END_PARAMETER,
        follows=[["<parameter="], *([END_FUNCTION, after] for after in (END_CALL, CALL, FUNCTION, END))],
        block_closing=END_CALL,
        until=until,
        clean=_lines,
    )


SYNTAX = {CALL: _syntax(rf"\s*{FUNCTION}", until=END_CALL), FUNCTION: _syntax("", until="")}
"""The syntax by the marker of a block. Some models leave out the first tag; but if only the second one is there, it may
be mentioned in text."""


class QwenXmlToolParser:
    name = "qwen_xml"
    markers = (CALL, FUNCTION)
    openings = ()
    tags = (CALL, END_CALL)

    def __init__(self, tools: Sequence[JsonMapping] = ()) -> None:
        self._tools = tools

    def for_tools(self, tools: Sequence[JsonMapping]) -> QwenXmlToolParser:
        return QwenXmlToolParser(tools)

    def block(self, marker: str) -> ToolCallReader:
        return TaggedValuesReader(SYNTAX[marker], self._tools)

    def grammar(self, tools: Sequence[JsonMapping], *, parallel: bool, special: Mapping[str, int]) -> str:
        opening, closing = lark.tag(CALL, special), lark.tag(END_CALL, special)
        several = lark.several("calls_block", "\n") if parallel else "calls_block"
        syntax = ValueSyntax(
            opening=lambda key: lark.literal(f"<parameter={key}>\n"),
            any_opening=r'"<parameter=" /[^>\s]{1,64}/ ">\n"',
            closing="\n</parameter>\n",
        )
        return lark.grammar(
            [f"calls: {several}", rf'calls_block: {opening} "\n" calls_one {closing}'],
            tools,
            lambda name, arguments: rf'"<function=" {lark.literal(name)} ">\n" {arguments} "</function>\n"',
            lambda rule, parameters: value_rules(rule, parameters, syntax),
        )
