"""Protocols for formats of tool calls, and for formats of whole answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol, runtime_checkable

from msgspec import Struct

from palestra.chat.output_pieces import Piece
from palestra.chat.tool_calls import ParsedCall
from palestra.util.json_types import JsonMapping


class ToolCallBlock(Struct, frozen=True, kw_only=True):
    """A block that has ended, with its calls. Without calls it stays text."""

    calls: list[ParsedCall] = []
    text: str = ""
    """If there are no calls: the part of the text after the marker that is certainly not a call, so that it is not
    searched."""
    rest: str = ""
    """Text that was fed and comes after the block."""
    until: str = ""
    """If there are no calls and this is not empty: the rest is not searched either, up to the end of the first
    occurrence of this text."""


class ToolCallReader(Protocol):
    """Reads one block, from after its marker. The result depends on the text alone, not on how it was cut into
    pieces."""

    def feed(self, text: str) -> ToolCallBlock | None:
        """Takes the next piece of text; None: the block has not ended yet."""
        ...

    def finish(self) -> ToolCallBlock:
        """Says that the text has ended."""
        ...


class ToolParser(Protocol):
    """The format in which a model family writes tool calls: what to search for, how to parse it, how to enforce it by a
    grammar. Reasoning is in think tags, and everything else is text."""

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts with which a block of calls begins."""
        ...

    @property
    def openings(self) -> tuple[str, ...]:
        """The same, but only at the beginning of the content."""
        ...

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags of the format: decoding keeps them even if they are special tokens."""
        ...

    def block(self, marker: str) -> ToolCallReader:
        """Returns a reader for the text that follows `marker`, which is one of `markers` or `openings`."""
        ...

    def grammar(self, tools: Sequence[JsonMapping], *, parallel: bool, special: Mapping[str, int]) -> str:
        """Returns a grammar in llguidance's Lark dialect for one call of one of `tools` (in OpenAI's format), or
        several in a row. Its top rule is `calls`, the names of the others begin with `calls_`; it has no `start`, and
        so can be part of a larger grammar. `special` maps texts that are one token to the token's id, which a grammar
        has to use."""
        ...


@runtime_checkable
class SchemaToolParser(Protocol):
    """A format in which values are plain text, so that only the tools' schemas say which types they have."""

    def for_tools(self, tools: Sequence[JsonMapping]) -> ToolParser:
        """Returns the same format, for calls of these tools (in OpenAI's format)."""
        ...


def for_tools(parser: ToolParser, tools: Sequence[JsonMapping]) -> ToolParser:
    """Returns the format that parses calls of these tools; the same format if it does not use schemas."""
    return parser.for_tools(tools) if isinstance(parser, SchemaToolParser) else parser


class AnswerStart(StrEnum):
    """Where in an answer the prompt ends."""

    FRESH = "fresh"
    """Before the answer."""
    IN_THOUGHT = "in_thought"
    IN_TEXT = "in_text"


class OutputParser(Protocol):
    """Call `feed` as the text arrives and `finish` once at its end; each returns the pieces that are certain by
    then."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


@runtime_checkable
class AnswerFormat(Protocol):
    """The format in which a model family writes a whole answer, if that is not text with think tags and calls in it."""

    @property
    def name(self) -> str: ...

    @property
    def tags(self) -> tuple[str, ...]:
        """Like `ToolParser.tags`."""
        ...

    @property
    def stops(self) -> tuple[str, ...]:
        """Tokens that end an answer, whatever the model's files say."""
        ...

    def start(self, prompt_end: str) -> AnswerStart:
        """Finds the start from the end of a prompt, including its special tokens."""
        ...

    def parser(self, *, start: AnswerStart, reads_calls: bool) -> OutputParser:
        """`reads_calls`: whether calls are parsed; otherwise they are text."""
        ...

    def grammar(self, tools: Sequence[JsonMapping], *, parallel: bool, special: Mapping[str, int]) -> str:
        """Like `ToolParser.grammar`."""
        ...

    def layout(self, top: str, *, start: AnswerStart, special: Mapping[str, int]) -> str:
        """Returns the rule `start` of a grammar for a whole answer, including reasoning, and the rules it needs. `top`
        is what the answer has to contain: `calls` (a rule that is added), `@answer` (another grammar), one of both, or
        `text_or_calls`."""
        ...


CallFormat = ToolParser | AnswerFormat
"""Either kind of format, as the registry stores them by name."""
