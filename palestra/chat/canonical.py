"""A canonical form of messages: clients send a history back with arguments in another order, content as parts, or
without reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from palestra.chat.pictures import lasting
from palestra.chat.tool_calls import END_THINK, THINK, read_json
from palestra.util.json_types import JsonMapping

Message = JsonMapping
"""A message as chat templates read it: `content` is text."""
REASONING_KEYS = ("reasoning_content", "reasoning")

_OPENING = re.compile(rf"\s*{THINK}")
# made once: it is needed for every message of a request
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def chain(root: object, messages: Sequence[Message]) -> list[bytes]:
    """Returns a name (a hash) for the conversation up to each length, from 0 on. `root` is what else it depends on."""
    names = [_digest(_dump(root))]
    for message in messages:
        names.append(extend(names[-1], message))
    return names


def extend(name: bytes, message: Message) -> bytes:
    return _digest(name + _dump(_said_text(message)))


def reasoning_of(message: Message) -> str | None:
    """Returns the reasoning of a message: from a field, or from the beginning of its content, as some clients write
    it."""
    for key in REASONING_KEYS:
        if isinstance(text := message.get(key), str) and text.strip():
            return text.strip()
    return _parts(message.get("content") or "").reasoning or None


def join(beginning: Message, rest: Message) -> Message:
    """Joins two parts of one message. A think block that the first part leaves open is reasoning, not content."""
    visible = beginning.get("content") or ""
    opened = visible.rfind(THINK)
    if opened < 0 or END_THINK in visible[opened:]:
        opened = len(visible)
    thoughts = [_thought(beginning), visible[opened:].removeprefix(THINK), _thought(rest)]
    return {
        "role": beginning["role"],
        "content": visible[:opened] + (rest.get("content") or ""),
        "reasoning_content": "".join(thoughts),
        "tool_calls": [*(beginning.get("tool_calls") or ()), *(rest.get("tool_calls") or ())],
    }


def _thought(message: Message) -> str:
    return next((text for key in REASONING_KEYS if isinstance(text := message.get(key), str)), "")


class _Parts(NamedTuple):
    reasoning: str
    visible: str


def _parts(content: str) -> _Parts:
    """Splits content into reasoning and text. Think blocks at the beginning are reasoning, which may be left out; one
    that is not closed has no end. Anywhere else such tags are text, as they are when the server itself returns them as
    content."""
    thoughts: list[str] = []
    place = 0
    while opening := _OPENING.match(content, place):
        end = content.find(END_THINK, opening.end())
        thoughts.append(content[opening.end() : end if end >= 0 else len(content)].strip())
        place = end + len(END_THINK) if end >= 0 else len(content)
    return _Parts("\n".join(thoughts).strip(), content[place:])


def _said_text(message: Message) -> list[Any]:
    role, text = message["role"], lasting(message.get("content") or "")
    if role == "assistant":  # frameworks strip the text of the assistant; other roles are not changed
        text = _parts(text).visible.strip()
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    return [role, text, calls, message.get("name")]


def _call(call: JsonMapping) -> list[Any]:
    function = call.get("function", call)
    return [function["name"], _parsed(function.get("arguments"))]


def _parsed(arguments: object) -> object:
    if not isinstance(arguments, str):
        return _numbers_alike(arguments or {})
    parsed = read_json(arguments or "{}")
    return arguments if parsed is None else _numbers_alike(parsed)


def _numbers_alike(value: object) -> object:
    """Makes equal numbers the same: 1.0 comes back as 1 from languages that have one kind of number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _numbers_alike(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers_alike(item) for item in value]
    return value


def _dump(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
