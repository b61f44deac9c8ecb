"""`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and since 2025 `[TOOL_CALLS]name[ARGS]{…}`: Mistral."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from palestra.chat.tool_calls import ParsedCall, call_of, read_json
from palestra.chat.tool_parsers import lark
from palestra.chat.tool_parsers.json_end import EndedJson, JsonEnd
from palestra.chat.tool_parsers.protocol import ToolCallBlock, ToolCallReader
from palestra.util.json_types import JsonMapping

MARKER, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
LONGEST = 256  # characters before the JSON; a longer text is not a name
HEAD = re.compile(r"\s*(?:(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?(?=\{)|(?=[\[{]))")


class MistralToolParser:
    name = "mistral"
    markers = (MARKER,)
    openings = ()
    tags = (MARKER, CALL_ID, ARGS)

    def block(self, marker: str) -> ToolCallReader:
        return _Reader()

    def grammar(self, tools: Sequence[JsonMapping], *, parallel: bool, special: Mapping[str, int]) -> str:
        """Returns a grammar: of the newer format, if the tokenizer has its tokens."""
        marker = lark.tag(MARKER, special)
        if ARGS in special:
            args = lark.tag(ARGS, special)
            several = "calls_block+" if parallel else "calls_block"
            tops = [f"calls: {several}", f"calls_block: {marker} calls_one"]
            return lark.rules(tops, tools, lambda name, arguments: f"{lark.literal(name)} {args} {arguments}")
        several = lark.several("calls_one", ", ") if parallel else "calls_one"
        tops = [f'calls: {marker} "[" {several} "]"']
        return lark.rules(tops, tools, lambda name, arguments: lark.call_object(name, "arguments", arguments))


class _Reader:
    def __init__(self) -> None:
        self._head = ""
        self._name: str | None = None
        self._json: JsonEnd | None = None

    def feed(self, text: str) -> ToolCallBlock | None:
        if self._json is None:
            self._head += text
            found = HEAD.match(self._head[:LONGEST])
            if found is None:
                return ToolCallBlock(rest=self._head) if len(self._head) >= LONGEST else None
            self._name = found["name"]
            self._head, text = self._head[: found.end()], self._head[found.end() :]
            self._json = JsonEnd()
        ended = self._json.feed(text)
        return None if ended is None else self._end(ended)

    def finish(self) -> ToolCallBlock:
        return ToolCallBlock(rest=self._head) if self._json is None else ToolCallBlock(text=self._head + self._json.fed)

    def _end(self, ended: EndedJson) -> ToolCallBlock:
        calls = [] if ended.is_broken else self._calls(read_json(ended.text))
        return ToolCallBlock(calls=calls, text="" if calls else self._head + ended.text, rest=ended.rest)

    def _calls(self, value: object) -> list[ParsedCall]:
        """Returns the calls; none if one of them cannot be parsed."""
        if self._name is not None:
            return [ParsedCall(name=self._name, arguments=value)] if isinstance(value, dict) else []
        calls = [call_of(one) for one in (value if isinstance(value, list) else [value])]
        return [call for call in calls if call is not None] if None not in calls else []
