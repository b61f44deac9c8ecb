"""Splits model output into reasoning, text and tool calls while it is generated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from palestra.chat.output_pieces import (
    ContentPiece,
    ParsedOutput,
    Piece,
    ReasoningPiece,
    ToolCallPiece,
    put_together,
)
from palestra.chat.tag_scanner import Tags
from palestra.chat.tool_calls import END_THINK, THINK

if TYPE_CHECKING:
    from palestra.chat.tool_parsers.protocol import ToolCallReader, ToolParser

__all__ = [
    "ContentPiece",
    "ParsedOutput",
    "Piece",
    "ReasoningParser",
    "ReasoningPiece",
    "ToolCallPiece",
    "put_together",
]

_END_THINK = Tags((END_THINK,))


class ReasoningParser:
    """Call `feed` as the text arrives and `finish` once at its end; each returns the pieces that are certain by then.

    From left to right: a think block ends where it is closed, or never, and there are no calls inside of it. A block of
    calls that cannot be parsed is text. Once a block of calls has begun, think tags are text.
    """

    def __init__(
        self,
        tools: ToolParser | None,
        *,
        in_thought: bool = False,
        thought_tags: tuple[str, str] = (THINK, END_THINK),
    ):
        """`tools`: None if no calls are searched for. `in_thought`: the prompt has opened a think block."""
        self._tools = tools
        self._think_tag, end = thought_tags
        self._end_tags = _END_THINK if end == END_THINK else Tags((end,))
        markers = tools.markers if tools else ()
        self._tags, self._later_tags = Tags((self._think_tag, *markers)), Tags(markers)
        self._openings = tools.openings if tools else ()
        self._pieces: list[Piece] = []
        self._unread: list[_Unread] = []
        self._buffer = ""
        """Text that was not emitted yet; in the end only what may begin a tag."""
        self._answer, self._thought = _Spaced(), _Spaced()
        self._between_thoughts = ""
        self._has_thought = self._has_called = False
        self._step: Callable[[bool], bool] = self._content
        if in_thought:
            self._begin_thought()
            self._step = self._opened_again

    def feed(self, text: str) -> list[Piece]:
        self._read(text, at_end=False)
        return self._certain()

    def finish(self) -> list[Piece]:
        self._read("", at_end=True)
        if not self._has_called and (spaces := self._answer.waiting()):
            self._pieces.append(ContentPiece(spaces))
        return self._certain()

    def _certain(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self, text: str, at_end: bool) -> None:
        self._unread.append(_Unread(text))
        while self._unread:
            self._buffer += self._unread[-1].take()
            if self._unread[-1].is_empty:
                self._unread.pop()
            while self._step(at_end and not self._unread):
                pass

    # Each step takes what it can from the buffer. True: continue with the step that is set now.

    def _content(self, at_end: bool) -> bool:
        if self._answer.is_empty and self._openings:
            self._say(len(self._buffer) - len(self._buffer.lstrip()))
            for opening in self._openings:
                if self._buffer.startswith(opening):
                    return self._begin_block(opening)
            if not at_end and any(opening.startswith(self._buffer) for opening in self._openings):
                return False
        found = self._tags.find(self._buffer, at_end)
        self._say(found.start)
        if found.tag is None:
            return False
        return self._begin_thought() if found.tag == self._think_tag else self._begin_block(found.tag)

    def _begin_thought(self) -> bool:
        self._buffer = self._buffer.removeprefix(self._think_tag)
        self._answer.is_trimmed = True
        self._thought = _Spaced(is_trimmed=True)
        self._between_thoughts = "\n" if self._has_thought else ""
        self._step = self._thinking
        return True

    def _opened_again(self, at_end: bool) -> bool:
        """Skips a think tag at the beginning: some models repeat the tag that their prompt ends with."""
        self._buffer = self._buffer.lstrip()
        if not at_end and self._buffer != self._think_tag and self._think_tag.startswith(self._buffer):
            return False
        return self._begin_thought()

    def _thinking(self, at_end: bool) -> bool:
        found = self._end_tags.find(self._buffer, at_end)
        if certain := self._thought.add(self._take(found.start)):
            self._think(certain)
        if found.tag is None:
            return False
        if self._thought.is_empty:
            self._think("")
        self._take(len(found.tag))
        self._step = self._content
        return True

    def _begin_block(self, marker: str) -> bool:
        assert self._tools is not None
        self._tags = self._later_tags
        self._step = partial(self._block, self._take(len(marker)), self._tools.block(marker))
        return True

    def _block(self, marker: str, reader: ToolCallReader, at_end: bool) -> bool:
        block = reader.feed(self._take(len(self._buffer)))
        if block is None and at_end:
            block = reader.finish()
        if block is None:
            return False
        self._step = partial(self._quoted, Tags((block.until,))) if block.until else self._content
        self._unread.append(_Unread(block.rest))
        self._pieces += [ToolCallPiece(call) for call in block.calls]
        self._has_called = self._has_called or bool(block.calls)
        if not block.calls:
            self._buffer = marker + block.text
            self._say(len(self._buffer))
        return False

    def _quoted(self, until: Tags, at_end: bool) -> bool:
        found = until.find(self._buffer, at_end)
        self._say(found.start)
        if found.tag is None:
            return False
        self._say(len(found.tag))
        self._step = self._content
        return True

    def _say(self, length: int) -> None:
        if certain := self._answer.add(self._take(length)):
            self._pieces.append(ContentPiece(certain))

    def _think(self, text: str) -> None:
        self._pieces.append(ReasoningPiece(self._between_thoughts + text))
        self._between_thoughts = ""
        self._has_thought = True

    def _take(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        return text


class _Spaced:
    """Text whose trailing spaces wait until something follows them."""

    def __init__(self, is_trimmed: bool = False):
        self.is_trimmed = is_trimmed
        """Whether spaces at its beginning are dropped."""
        self.is_empty = True
        self._waiting: list[str] = []

    def add(self, text: str) -> str:
        """Adds text and returns what is certain by now."""
        body = text.rstrip()
        if not body:
            self._waiting.append(text)
            return ""
        certain = "".join(self._waiting) + body
        self._waiting = [text[len(body) :]]
        if self.is_empty and self.is_trimmed:
            certain = certain.lstrip()
        self.is_empty = False
        return certain

    def waiting(self) -> str:
        return "" if self.is_empty and self.is_trimmed else "".join(self._waiting)


class _Unread:
    """A text that is read in slices, so that its rest is not copied again and again."""

    SLICE = 4096

    def __init__(self, text: str):
        self._text = text
        self._place = 0

    def take(self) -> str:
        start = self._place
        self._place += self.SLICE
        return self._text[start : self._place]

    @property
    def is_empty(self) -> bool:
        return self._place >= len(self._text)
