"""What a way of writing tool calls, or all of an answer, has to say of itself.

Owns: the protocols, and what becomes of a block. Never touches: any one format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol, runtime_checkable

from msgspec import Struct

from palestra.chat.output_pieces import Piece
from palestra.chat.tool_calls import ParsedCall
from palestra.util.json_types import JsonMapping


class ToolCallBlock(Struct, frozen=True, kw_only=True):
    """A block of calls that is over: its calls, or none. Then it stays text."""

    calls: list[ParsedCall] = []
    text: str = ""
    """Without calls: what of the text after the marker is no call for certain, so that nothing is looked for in it."""
    rest: str = ""
    """What was fed and comes after all this."""
    until: str = ""
    """Without calls: where not empty, nothing is looked for in the rest either, up to the end of the first of these."""


class ToolCallReader(Protocol):
    """Reads one block, from behind its marker. Its answer depends on the text alone, not on how it was cut."""

    def feed(self, text: str) -> ToolCallBlock | None:
        """None: it is not over yet."""
        ...

    def finish(self) -> ToolCallBlock:
        """Nothing comes any more."""
        ...


class ToolParser(Protocol):
    """How a family of models writes tool calls: what to look for, how to read it, how to demand it. What it thinks
    stands in think tags, and all else is text."""

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a block of calls begins with."""
        ...

    @property
    def openings(self) -> tuple[str, ...]:
        """The same, but only where nothing was said before it."""
        ...

    @property
    def tags(self) -> tuple[str, ...]:
        """All that it is written with: decoding keeps these even where they are special tokens."""
        ...

    def block(self, marker: str) -> ToolCallReader:
        """For the text that follows `marker`, one of `markers` or `openings`."""
        ...

    def grammar(self, tools: Sequence[JsonMapping], *, parallel: bool, special: Mapping[str, int]) -> str:
        """llguidance's Lark dialect: one call of one of `tools` (as OpenAI writes them), or several in a row. Its top
        rule is `calls`, the names of the others begin with `calls_`; it has no `start`, and so can be part of a larger
        grammar. `special`: texts that are one token to the tokenizer, and its id, which a grammar has to name."""
        ...


@runtime_checkable
class SchemaToolParser(Protocol):
    """What a tool format also has in which values are plain text: only the tools' schemas tell their types."""

    def for_tools(self, tools: Sequence[JsonMapping]) -> ToolParser:
        """The same format, for calls of these tools (as OpenAI writes them)."""
        ...


def for_tools(parser: ToolParser, tools: Sequence[JsonMapping]) -> ToolParser:
    """The format as it reads calls of these tools; itself, where schemas change nothing."""
    return parser.for_tools(tools) if isinstance(parser, SchemaToolParser) else parser


class AnswerStart(StrEnum):
    """Where in an answer the prompt ends."""

    FRESH = "fresh"
    """Before all of it."""
    IN_THOUGHT = "in_thought"
    IN_TEXT = "in_text"


class OutputParser(Protocol):
    """`feed` as the text comes, `finish` once at its end; each gives the pieces that are certain by now."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


@runtime_checkable
class AnswerFormat(Protocol):
    """How a family of models writes all of an answer, where that is not text with think tags and calls in it."""

    @property
    def name(self) -> str: ...

    @property
    def tags(self) -> tuple[str, ...]:
        """As `ToolParser.tags`."""
        ...

    @property
    def stops(self) -> tuple[str, ...]:
        """Tokens that end an answer, whatever the model's files say."""
        ...

    def start(self, prompt_end: str) -> AnswerStart:
        """From the last words of a prompt, special tokens and all."""
        ...

    def parser(self, *, start: AnswerStart, reads_calls: bool) -> OutputParser:
        """`reads_calls`: else they are text."""
        ...

    def grammar(self, tools: Sequence[JsonMapping], *, parallel: bool, special: Mapping[str, int]) -> str:
        """As `ToolParser.grammar`."""
        ...

    def layout(self, top: str, *, start: AnswerStart, special: Mapping[str, int]) -> str:
        """Rule `start` of a grammar for all of an answer, thinking included, and the rules it needs. `top` is what has
        to come in it: `calls` (a rule that is added), `@answer` (another grammar), one of both, or `text_or_calls`."""
        ...


CallFormat = ToolParser | AnswerFormat
"""Either kind of format: what the registry holds by name."""
