"""What a way of writing tool calls has to say of itself.

Owns: the protocols, and what becomes of a block. Never touches: any one format, thinking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

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
    """How a family of models writes tool calls: what to look for, how to read it, how to demand it."""

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
    return parser.for_tools(tools) if isinstance(parser, SchemaToolParser) else parser
