"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5 and later."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from palestra.chat.tool_parsers import lark
from palestra.chat.tool_parsers.protocol import ToolCallReader
from palestra.chat.tool_parsers.tagged_values import TaggedValuesReader, TagSyntax
from palestra.chat.tool_parsers.value_grammar import ValueSyntax, value_rules
from palestra.util.json_types import JsonMapping

CALL, END_CALL = "<tool_call>", "</tool_call>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
LINE = "\n"

SYNTAX = TagSyntax(
    head=re.compile(rf"\s*(?P<name>[^<>\s]+)\s*(?={KEY}|{END_CALL})"),
    between=re.compile(rf"\s*(?:{KEY}(?P<key>[^<]*){END_KEY}\s*{VALUE}|(?={END_CALL}))"),
    closing=END_VALUE,
    follows=[[KEY], [END_CALL]],
    block_closing=END_CALL,
    until=END_CALL,
    clean=str,
)


class GlmToolParser:
    name = "glm"
    markers = (CALL,)
    openings = ()
    tags = (CALL, END_CALL, KEY, END_KEY, VALUE, END_VALUE)

    def __init__(self, tools: Sequence[JsonMapping] = ()) -> None:
        self._tools = tools

    def for_tools(self, tools: Sequence[JsonMapping]) -> GlmToolParser:
        return GlmToolParser(tools)

    def block(self, marker: str) -> ToolCallReader:
        return TaggedValuesReader(SYNTAX, self._tools)

    def grammar(self, tools: Sequence[JsonMapping], *, parallel: bool, special: Mapping[str, int]) -> str:
        opening, closing, key, end_key, value = (
            lark.tag(text, special) for text in (CALL, END_CALL, KEY, END_KEY, VALUE)
        )
        several = lark.several("calls_block", "\n") if parallel else "calls_block"
        syntax = ValueSyntax(
            opening=lambda name: rf'{key} {lark.literal(name)} {end_key} "\n" {value}',
            any_opening=rf'{key} /[^<\s]{{1,64}}/ {end_key} "\n" {value}',
            closing=END_VALUE,
            closing_token=special.get(END_VALUE),
            after="\n",
        )
        return lark.grammar(
            [f"calls: {several}", f"calls_block: {opening} calls_one {closing}"],
            tools,
            lambda name, arguments: f"{lark.literal(name + LINE)} {arguments}",
            lambda rule, parameters: value_rules(rule, parameters, syntax),
        )
