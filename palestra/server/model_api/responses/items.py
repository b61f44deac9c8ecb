"""The `input` of a request as messages of a chat.

Everything the model said between two inputs is one message: its reasoning, its text, its calls. Where items carry the
tokens of a call, its last item is known, and the message ends there.
Owns: items, and where each message came from. Never touches: what a message may say; see `openai.messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.server.core.errors import ApiError
from palestra.server.core.wire_errors import shown
from palestra.server.model_api.chat.messages import TOKEN_FIELDS
from palestra.server.model_api.errors import invalid

ROLES = ("user", "assistant", "system", "developer")
INSTRUCTING = ("system", "developer")
NO_REFERENCE = "nothing is kept under its id; send the item itself"
BLANK_LINE = {"type": "text", "text": "\n\n"}


@dataclass(slots=True)
class Origins:
    """Messages, and the place in the request that each came from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, message: dict[str, Any], place: str) -> None:
        self.messages.append(message)
        self.places.append(place)


@dataclass(slots=True)
class _Turn:
    """What the model said, so far."""

    place: str
    thoughts: list[str] = field(default_factory=list)
    content: list[Any] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: dict[str, Any] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message | self.tokens


def read_input(given: str | Sequence[dict[str, Any]], instructions: str | None) -> Origins:
    reader = _Reader()
    if isinstance(given, str):
        reader.found.add({"role": "user", "content": given}, "input")
    else:
        for i, item in enumerate(given):
            reader.read(item, f"input[{i}]")
        reader.flush()
    return _instructed(reader.found, instructions) if instructions else reader.found


class _Reader:
    def __init__(self) -> None:
        self.found = Origins()
        self._turn: _Turn | None = None
        self._kinds: dict[str, Callable[[dict[str, Any], str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "function_call_output": self._output,
        }

    def read(self, item: dict[str, Any], place: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "item_reference":
            raise _wrong(place, NO_REFERENCE, code="unsupported")
        if not isinstance(kind, str) or kind not in self._kinds:
            known = ", ".join(self._kinds)
            raise _wrong(place, f"type is {shown(kind)}; items read here: {known}", code="unsupported")
        self._kinds[kind](item, place)
        tokens = _tokens(item, place)
        if tokens and self._turn is None:
            raise _wrong(place, f"{TOKEN_FIELDS[1]} belongs to what the model said")
        if tokens and self._turn is not None:
            self._turn.tokens = tokens
            self.flush()

    def flush(self) -> None:
        if self._turn is not None:
            self.found.add(self._turn.message(), self._turn.place)
            self._turn = None

    def _message(self, item: dict[str, Any], place: str) -> None:
        role, content = item.get("role"), item.get("content")
        if role not in ROLES:
            raise _wrong(place, f"role is {shown(role)}; it must be one of {', '.join(ROLES)}")
        if content is None:
            raise _wrong(place, "content is missing")
        if role == "assistant":
            self._said(place).content += _parts(content)
        else:
            self.flush()
            self.found.add({"role": role, "content": content}, place)

    def _reasoning(self, item: dict[str, Any], place: str) -> None:
        texts = _texts(item, "content", place) or _texts(item, "summary", place)
        if not texts and item.get("encrypted_content"):
            raise _wrong(place, "reasoning encrypted elsewhere cannot be read; leave the item out", code="unsupported")
        self._said(place).thoughts += texts

    def _call(self, item: dict[str, Any], place: str) -> None:
        call_id, name, arguments = (_string(item, key, place) for key in ("call_id", "name", "arguments"))
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._said(place).calls.append(call)

    def _output(self, item: dict[str, Any], place: str) -> None:
        self.flush()
        call_id, output = _string(item, "call_id", place), item.get("output")
        if output is None:
            raise _wrong(place, "output is missing")
        self.found.add({"role": "tool", "tool_call_id": call_id, "content": output}, place)

    def _said(self, place: str) -> _Turn:
        if self._turn is None:
            self._turn = _Turn(place)
        return self._turn


def _instructed(found: Origins, instructions: str) -> Origins:
    """They and the system messages the input begins with are one: templates know one, at the beginning."""
    count = next(
        (i for i, message in enumerate(found.messages) if message["role"] not in INSTRUCTING), len(found.messages)
    )
    content: list[Any] = _parts(instructions)
    for message in found.messages[:count]:
        content += [BLANK_LINE, *_parts(message["content"])]
    system = {"role": "system", "content": content}
    return Origins([system, *found.messages[count:]], ["instructions", *found.places[count:]])


def _parts(content: Any) -> list[Any]:
    """What is no content at all is refused where messages are read."""
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _texts(item: dict[str, Any], key: str, place: str) -> list[str]:
    """Of reasoning: `content` in full, or `summary`."""
    parts = item.get(key) or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise _wrong(place, f"{key} must be a list of texts")
    return [_string(part, "text", f"{place}.{key}[{i}]") for i, part in enumerate(parts)]


def _tokens(item: dict[str, Any], place: str) -> dict[str, Any]:
    """On the last item of a call: all of them, or none."""
    tokens = {key: value for key in TOKEN_FIELDS if (value := item.get(key)) is not None}
    if tokens and len(tokens) < len(TOKEN_FIELDS):
        missing = ", ".join(key for key in TOKEN_FIELDS if key not in tokens)
        raise _wrong(place, f"{missing} missing; send {', '.join(TOKEN_FIELDS)}, or none of them")
    return tokens


def _string(item: dict[str, Any], key: str, place: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _wrong(place, f"{key} is {shown(value)}; it must be a string")
    return value


def _wrong(place: str, detail: str, *, code: str | None = None) -> ApiError:
    return invalid(place, f"{place}: {detail}", code=code)
