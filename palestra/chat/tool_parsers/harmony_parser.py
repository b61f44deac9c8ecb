"""Parses answers of gpt-oss while they are generated: messages with a header, each in a channel."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from palestra.chat.output_pieces import ContentPiece, Piece, ReasoningPiece, ToolCallPiece
from palestra.chat.tag_scanner import Tags
from palestra.chat.tool_calls import ParsedCall, read_json
from palestra.chat.tool_parsers.protocol import AnswerStart

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS, FUNCTIONS = "analysis", "functions."
LONGEST = 512  # characters of a header; a longer text is not one

_IN_HEADER = Tags((MESSAGE, END, CALL, RETURN))
_IN_BODY = Tags((START, CHANNEL, END, CALL, RETURN))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_BEGINNINGS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, "assistant", "to=")
"""Tokens with which a header, or the text between two messages, begins."""


@dataclass(frozen=True, slots=True)
class Header:
    text: str
    channel: str = ""
    recipient: str = ""
    """Empty: the message is for the user."""

    @property
    def is_thought(self) -> bool:
        return self.channel == ANALYSIS and not self.recipient


def header_of(text: str) -> Header:
    """Parses a header. The recipient may stand before or after the channel."""
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    return Header(
        text.strip().removeprefix(f"{START}assistant"), channel[1] if channel else "", recipient[1] if recipient else ""
    )


class HarmonyParser:
    """A message to a function is a call, whatever its channel; one in the analysis channel is reasoning; all others are
    text. Several reasoning messages, and several texts, are joined by a line break. A call that cannot be parsed is
    text, including its header. A text without a header is text."""

    def __init__(self, *, start: AnswerStart, reads_calls: bool) -> None:
        self._reads_calls = reads_calls
        self._pieces: list[Piece] = []
        self._buffer = ""
        self._call: list[str] = []
        self._has_thought = self._has_said = False
        self._is_first = True
        """Whether nothing of this message was emitted yet."""
        self._message = Header("", ANALYSIS if start is AnswerStart.IN_THOUGHT else "")
        self._step: Callable[[bool], bool] = self._header if start is AnswerStart.FRESH else self._body

    def feed(self, text: str) -> list[Piece]:
        return self._read(text, at_end=False)

    def finish(self) -> list[Piece]:
        pieces = self._read("", at_end=True)
        if self._step == self._body:
            self._end_message()
            pieces, self._pieces = [*pieces, *self._pieces], []
        return pieces

    def _read(self, text: str, at_end: bool) -> list[Piece]:
        self._buffer += text
        while self._step(at_end):
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    # Each step takes what it can from the buffer. True: the step that is set now has something to do.

    def _header(self, at_end: bool) -> bool:
        stripped = self._buffer.lstrip()
        is_open = any(stripped.startswith(text) or text.startswith(stripped) for text in _BEGINNINGS)
        found = _IN_HEADER.find(self._buffer[:LONGEST], at_end)
        if not is_open:
            return self._begin(Header(""))
        if found.tag is None and len(self._buffer) > LONGEST:
            self._begin(Header(""))
            self._tell(self._take(LONGEST))
            return True
        if found.tag is None:
            # An incomplete header is dropped; a text without any token of a header is text.
            has_text = stripped and START not in stripped and CHANNEL not in stripped
            return at_end and bool(has_text) and self._begin(Header(""))
        text = self._take(found.start)
        self._take(len(found.tag))
        return self._begin(header_of(text)) if found.tag == MESSAGE else bool(self._buffer)

    def _begin(self, header: Header) -> bool:
        self._message, self._is_first, self._call = header, True, []
        self._step = self._body
        return True

    def _body(self, at_end: bool) -> bool:
        found = _IN_BODY.find(self._buffer, at_end)
        if text := self._take(found.start):
            self._tell(text)
        if found.tag is None:
            return False
        if found.tag not in (START, CHANNEL):  # those two begin the next header
            self._take(len(found.tag))
        self._end_message()
        self._step = self._header
        return True

    def _tell(self, text: str) -> None:
        if self._message.recipient and self._reads_calls:
            self._call.append(text)
        elif self._message.is_thought:
            self._pieces.append(ReasoningPiece(self._joined(text, self._has_thought)))
            self._has_thought = True
        else:
            if self._is_first and self._message.recipient:
                text = f"{self._message.text}{MESSAGE}{text}"
            self._pieces.append(ContentPiece(self._joined(text, self._has_said)))
            self._has_said = True

    def _joined(self, text: str, has_some: bool) -> str:
        is_first, self._is_first = self._is_first, False
        return "\n" + text if is_first and has_some else text

    def _end_message(self) -> None:
        if self._message.is_thought and self._is_first:
            self._tell("")
        if self._message.recipient and self._reads_calls:
            body = "".join(self._call)
            arguments = read_json(body)
            if isinstance(arguments, dict):
                name = self._message.recipient.removeprefix(FUNCTIONS)
                self._pieces.append(ToolCallPiece(ParsedCall(name=name, arguments=arguments)))
            else:
                text = f"{self._message.text}{MESSAGE}{body}"
                self._pieces.append(ContentPiece(self._joined(text, self._has_said)))
                self._has_said = True

    def _take(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        return text
