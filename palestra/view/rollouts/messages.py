"""Messages of a conversation as people read them: text, reasoning, tool calls, results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from enum import StrEnum

from msgspec import Struct

from palestra.chat.pictures import SCHEME
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonObject
from palestra.util.picture_parts import is_picture, url_of

TAGS = {"assistant": "think|thinking|reasoning|tool_call|function_call", "user": "tool_response"}
"""What models and templates write between tags, by the role that may write it: a system prompt only explains them."""
MARKED = {
    role: re.compile(rf"<(?P<tag>{tags})>(?P<inside>.*?)(?:</(?P=tag)>|\Z)", re.DOTALL) for role, tags in TAGS.items()
}
REASONING = ("think", "thinking", "reasoning")
REASONING_KEYS = ("reasoning_content", "reasoning")
OWN_KEYS = {"role", "content", "tool_calls", "name", "tool_call_id", *REASONING_KEYS}
LONG = 600  # a result with more characters is folded


class PieceKind(StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"
    RESULT = "result"
    PICTURE = "picture"
    """Its text is the digest of a file that the run keeps."""
    OTHER = "other"


class Piece(Struct, frozen=True):
    kind: PieceKind
    title: str
    text: str
    is_open: bool = True


class ShownMessage(Struct, frozen=True):
    role: str
    name: str
    pieces: list[Piece]


def show_messages(messages: Sequence[object]) -> list[ShownMessage]:
    return [_shown(message) for message in messages if isinstance(message, dict)]


def _shown(message: Message) -> ShownMessage:
    role = str(message.get("role", "?"))
    pieces = [
        Piece(PieceKind.REASONING, "reasoning", str(message[key]), False) for key in REASONING_KEYS if message.get(key)
    ]
    for content in _contents(message):
        if isinstance(content, Piece):
            pieces.append(content)
        elif role in ("tool", "function"):
            pieces.append(Piece(PieceKind.RESULT, f"result{_of(message)}", content, len(content) <= LONG))
        else:
            pieces += _split(role, content)
    pieces += [_call(call) for call in message.get("tool_calls") or []]
    rest = {key: value for key, value in message.items() if key not in OWN_KEYS and value not in (None, "", [], {})}
    if rest:
        pieces.append(Piece(PieceKind.OTHER, ", ".join(rest), _pretty(rest), False))
    return ShownMessage(role, str(message.get("name") or ""), pieces)


def _contents(message: Message) -> Iterator[str | Piece]:
    """The content of a message: text, and pictures that the run keeps where they stand among it."""
    content = message.get("content")
    if not isinstance(content, list) or not any(map(_digest, content)):
        yield content_text(message)
        return
    text = ""
    for part in content:
        if digest := _digest(part):
            if text:
                yield text
            text = ""
            yield Piece(PieceKind.PICTURE, "picture", digest)
        else:
            text += _part_text(part)
    if text:
        yield text


def _digest(part: object) -> str:
    """That of a picture; empty for other parts."""
    url = url_of(part) if isinstance(part, dict) and is_picture(part) else None
    return url.removeprefix(SCHEME) if isinstance(url, str) and url.startswith(SCHEME) else ""


def content_text(message: Message) -> str:
    """The text of a message, whichever form its content has."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(_part_text(part) for part in content)
    return "" if content is None else content if isinstance(content, str) else _pretty(content)


def _part_text(part: object) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return part["text"]
    if isinstance(part, dict) and "type" in part:
        return f"[{part['type']}]"
    return str(part)


def _split(role: str, text: str) -> Iterator[Piece]:
    """Text with reasoning and tool calls between tags, as models without a chat API's fields write them."""
    at = 0
    for found in MARKED[role].finditer(text) if role in MARKED else ():
        if before := text[at : found.start()].strip("\n"):
            yield Piece(PieceKind.TEXT, "", before)
        inside, tag = found["inside"].strip(), found["tag"]
        if tag in REASONING:
            yield Piece(PieceKind.REASONING, "reasoning", inside, False)
        elif tag == "tool_response":
            yield Piece(PieceKind.RESULT, "result", inside, len(inside) <= LONG)
        else:
            yield _written_call(inside)
        at = found.end()
    if rest := text[at:].strip("\n"):
        yield Piece(PieceKind.TEXT, "", rest)


def _written_call(inside: str) -> Piece:
    try:
        call = json.loads(inside)
    except (ValueError, RecursionError):  # a model may open more brackets than Python can follow
        return Piece(PieceKind.CALL, "call", inside)
    return _call(call) if isinstance(call, dict) else Piece(PieceKind.CALL, "call", inside)


def _call(call: object) -> Piece:
    if not isinstance(call, dict):
        return Piece(PieceKind.CALL, "call", str(call))
    function = call.get("function")
    inner: JsonObject = function if isinstance(function, dict) else call
    arguments = inner.get(
        "arguments", {key: value for key, value in inner.items() if key not in ("name", "id", "type")}
    )
    text = arguments if isinstance(arguments, str) else _pretty(arguments)
    return Piece(PieceKind.CALL, f"call {inner.get('name', '?')}", text, len(text) <= LONG)


def _of(message: Message) -> str:
    name = message.get("name") or message.get("tool_call_id")
    return f" of {name}" if name else ""


def _pretty(value: object) -> str:
    return (
        json.dumps(value, ensure_ascii=False, default=str)
        if len(str(value)) < 80
        else json.dumps(value, indent=2, ensure_ascii=False, default=str)
    )
