"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen, and most later models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from palestra.chat.tool_calls import TAGS, ParsedCall, call_of, closing_of, read_json
from palestra.chat.tool_parsers import lark
from palestra.chat.tool_parsers.json_end import JsonEnd
from palestra.chat.tool_parsers.protocol import ToolCallBlock, ToolCallReader
from palestra.util.json_types import JsonMapping


class HermesToolParser:
    name = "hermes"
    markers = TAGS
    openings = ()
    tags = tuple(text for tag in TAGS for text in (tag, closing_of(tag)))

    def block(self, marker: str) -> ToolCallReader:
        return _Reader(closing_of(marker))

    def grammar(self, tools: Sequence[JsonMapping], *, parallel: bool, special: Mapping[str, int]) -> str:
        opening, closing = (lark.tag(text, special) for text in (TAGS[0], closing_of(TAGS[0])))
        several = lark.several("calls_block", "\n") if parallel else "calls_block"
        return lark.rules(
            [f"calls: {several}", rf'calls_block: {opening} "\n" calls_one "\n" {closing}'],
            tools,
            lambda name, arguments: lark.call_object(name, "arguments", arguments),
        )


class _Reader:
    """Reads a block. A call ends with its closing tag; if the model forgot it, at the next opening tag or at the
    end."""

    def __init__(self, closing: str) -> None:
        self._closing = closing
        self._json = JsonEnd()
        self._written = ""
        self._call: ParsedCall | None = None
        self._after: list[str] = []

    def feed(self, text: str) -> ToolCallBlock | None:
        if self._call is None:
            ended = self._json.feed(text)
            if ended is None:
                return None
            self._call = None if ended.is_broken else call_of(read_json(ended.text))
            if self._call is None:
                return self._unreadable()
            self._written, text = ended.text, ended.rest
        self._after.append(text)
        return self._end(self._call, at_end=False) if text.strip() else None

    def finish(self) -> ToolCallBlock:
        found = self._end(self._call, at_end=True) if self._call else None
        return found or self._unreadable()

    def _end(self, call: ParsedCall, at_end: bool) -> ToolCallBlock | None:
        after = "".join(self._after)
        rest = after.lstrip()
        if rest.startswith(self._closing):
            return ToolCallBlock(calls=[call], rest=rest[len(self._closing) :])
        if self._closing.startswith(rest) and not at_end:
            return None
        return ToolCallBlock(calls=[call], rest=after) if rest[:1] in ("<", "") else self._unreadable()

    def _unreadable(self) -> ToolCallBlock:
        """Returns the block as text up to its first closing tag. This tag may be part of an argument; one cannot
        know."""
        fed = self._json.fed if self._call is None else self._written + "".join(self._after)
        return ToolCallBlock(rest=fed, until=self._closing)
