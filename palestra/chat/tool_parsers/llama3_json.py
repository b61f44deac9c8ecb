"""`{"name": …, "parameters": {…}}` and nothing else: Llama 3, if its template asks for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from palestra.chat.tool_calls import ParsedCall, call_of, read_json
from palestra.chat.tool_parsers import lark
from palestra.chat.tool_parsers.json_end import JsonEnd
from palestra.chat.tool_parsers.protocol import ToolCallBlock, ToolCallReader
from palestra.util.json_types import JsonMapping

PYTHON_TAG = "<|python_tag|>"
BRACE = "{"
SEPARATORS = "; \t\r\n"


class Llama3JsonToolParser:
    """From the tag, or the beginning of the answer, to its end there are calls and nothing else. Otherwise all of it is
    text, because it may be JSON that a user asked for."""

    name = "llama3_json"
    markers = (PYTHON_TAG,)
    openings = (BRACE,)
    tags = (PYTHON_TAG,)

    def block(self, marker: str) -> ToolCallReader:
        return _Reader(BRACE if marker == BRACE else "")

    def grammar(self, tools: Sequence[JsonMapping], *, parallel: bool, special: Mapping[str, int]) -> str:
        several = lark.several("calls_one", "; ") if parallel else "calls_one"
        return lark.rules(
            [f"calls: {several}"], tools, lambda name, arguments: lark.call_object(name, "parameters", arguments)
        )


class _Reader:
    def __init__(self, beginning: str) -> None:
        self._beginning = beginning
        """The part of the first object that is in the marker."""
        self._json: JsonEnd | None = JsonEnd(beginning)
        self._calls: list[ParsedCall] = []
        self._read: list[str] = []
        """Objects, and the text between them."""

    def feed(self, text: str) -> ToolCallBlock | None:
        while text := self._skip(text):
            self._json = self._json or JsonEnd()
            ended = self._json.feed(text)
            if ended is None:
                return None
            self._read.append(ended.text)
            call = None if ended.is_broken else _call(read_json(ended.text))
            if call is None:
                return self._unreadable(ended.rest)
            self._calls.append(call)
            self._json, text = None, ended.rest
        return None

    def finish(self) -> ToolCallBlock:
        if self._json is None:
            return ToolCallBlock(calls=self._calls)
        self._read.append(self._json.fed)
        return self._unreadable("")

    def _skip(self, text: str) -> str:
        if self._json is not None:
            return text
        following = text.lstrip(SEPARATORS)
        self._read.append(text[: len(text) - len(following)])
        return following

    def _unreadable(self, rest: str) -> ToolCallBlock:
        return ToolCallBlock(text="".join(self._read).removeprefix(self._beginning), rest=rest)


def _call(value: object) -> ParsedCall | None:
    """Returns a call if the object has arguments: much other JSON also has a name."""
    is_call = isinstance(value, dict) and ("parameters" in value or "arguments" in value)
    return call_of(value) if is_call else None
