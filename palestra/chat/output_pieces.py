"""The pieces of an answer: reasoning, text and tool calls, in the order they were written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from palestra.chat.tool_calls import ParsedCall


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    text: str


@dataclass(frozen=True, slots=True)
class ContentPiece:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A complete tool call: it is emitted when its end is known."""

    call: ParsedCall


Piece = ReasoningPiece | ContentPiece | ToolCallPiece


@dataclass(slots=True)
class ParsedOutput:
    """All pieces joined."""

    reasoning: str | None = None
    """None: there was no reasoning. Empty: a think block was opened and closed again."""
    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


def put_together(pieces: Iterable[Piece]) -> ParsedOutput:
    output = ParsedOutput()
    thoughts: list[str] = []
    texts: list[str] = []
    for piece in pieces:
        match piece:
            case ReasoningPiece(text):
                thoughts.append(text)
            case ContentPiece(text):
                texts.append(text)
            case ToolCallPiece(call):
                output.calls.append(call)
    output.reasoning = "".join(thoughts) if thoughts else None
    output.content = "".join(texts)
    return output
