"""Parses calls whose arguments are texts between tags, while they are generated."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from palestra.chat.tag_scanner import Tags
from palestra.chat.tool_calls import ParsedCall
from palestra.chat.tool_parsers.protocol import ToolCallBlock
from palestra.chat.tool_parsers.schema_values import parameters_of, property_of, typed
from palestra.util.json_types import JsonMapping, JsonObject

LONGEST = 512  # characters of a name, or between two values; a longer text is not a call
SPACES = 16  # between a value's closing tag and the tag that confirms it; templates write one space at most
END = ""
"""In `follows`: the end of the text."""


@dataclass(frozen=True, slots=True)
class TagSyntax:
    head: re.Pattern[str]
    """Matches up to the call's `name`."""
    between: re.Pattern[str]
    """Matches what is between two values: with the next one's `key`, or without a key the end of the call."""
    closing: str
    """Ends a value if one of `follows` comes next: a value itself may contain the text of this tag."""
    follows: Sequence[Sequence[str]]
    """Sequences of tags, with spaces between them."""
    block_closing: str
    """Ends the block; some models forget it."""
    until: str
    """In a block that cannot be parsed, nothing is searched for up to this text."""
    clean: Callable[[str], str]
    """Removes what the template writes around a value."""


class TaggedValuesReader:
    """Reads one call, from after its marker."""

    def __init__(self, syntax: TagSyntax, tools: Sequence[JsonMapping]) -> None:
        self._syntax, self._tools = syntax, tools
        self._closing = Tags((syntax.closing,))
        self._fed: list[str] = []
        self._buffer = ""
        self._name: str | None = None
        self._key = ""
        self._value: list[str] = []
        self._arguments: JsonObject = {}
        self._step: Callable[[bool], bool] = self._head
        self._ended: ToolCallBlock | None = None

    def feed(self, text: str) -> ToolCallBlock | None:
        return self._read(text, at_end=False)

    def finish(self) -> ToolCallBlock:
        return self._read("", at_end=True) or self._unreadable()

    def _read(self, text: str, at_end: bool) -> ToolCallBlock | None:
        self._fed.append(text)
        self._buffer += text
        while self._ended is None and self._step(at_end):
            pass
        return self._ended

    # Each step takes what it can from the buffer. True: the step that is set now has something to do.

    def _head(self, at_end: bool) -> bool:
        if (found := self._found(self._syntax.head)) is None:
            return False
        self._name = found["name"].strip()
        self._step = self._between
        return True

    def _between(self, at_end: bool) -> bool:
        if (found := self._found(self._syntax.between)) is None:
            return False
        if found["key"] is None:
            self._step = self._after
        else:
            self._key, self._value, self._step = found["key"].strip(), [], self._in_value
        return True

    def _in_value(self, at_end: bool) -> bool:
        found = self._closing.find(self._buffer, at_end)
        self._value.append(self._take(found.start))
        if found.tag is None:
            return False
        rest = self._buffer[len(found.tag) : len(found.tag) + LONGEST]
        follows = [_follows(rest, tags, at_end) for tags in self._syntax.follows]
        if True in follows:
            self._take(len(found.tag))
            parameters = parameters_of(self._tools, self._name or "")
            text = self._syntax.clean("".join(self._value))
            self._arguments[self._key] = typed(text, property_of(parameters, self._key), parameters)
            self._step = self._between
            return True
        if None in follows:
            return False
        self._value.append(self._take(len(found.tag)))
        return True

    def _after(self, at_end: bool) -> bool:
        closing, rest = self._syntax.block_closing, self._buffer.lstrip()
        if not at_end and rest != closing and closing.startswith(rest):
            return False
        rest = rest[len(closing) :] if rest.startswith(closing) else self._buffer
        call = ParsedCall(name=self._name or "", arguments=self._arguments)
        self._ended = ToolCallBlock(calls=[call], rest=rest)
        return False

    def _found(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._buffer[:LONGEST])
        if found is not None:
            self._take(found.end())
        elif len(self._buffer) >= LONGEST:
            self._ended = self._unreadable()
        return found

    def _take(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        return text

    def _unreadable(self) -> ToolCallBlock:
        return ToolCallBlock(rest="".join(self._fed), until=self._syntax.until)


def _follows(text: str, tags: Sequence[str], at_end: bool) -> bool | None:
    """Whether a text begins with these tags; None: that depends on what follows."""
    for tag in tags:
        stripped = text.lstrip()
        if len(text) - len(stripped) > SPACES:
            return False
        if not stripped:
            return None if not at_end else tag == END
        if tag == END or not stripped.startswith(tag):
            return None if tag != END and tag.startswith(stripped) and not at_end else False
        text = stripped[len(tag) :]
    return True
