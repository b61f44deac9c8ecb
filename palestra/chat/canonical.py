"""What a message says, whoever wrote it down: clients send a history back with arguments in another order, content as
parts, reasoning left out.

Owns: when two messages are the same. Never touches: tokens, templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from palestra.chat.tool_calls import THINK, split_thinking

Message = Mapping[str, Any]
"""As chat templates read them: `content` is text."""
REASONING_KEYS = ("reasoning_content", "reasoning")


def chain(root: Any, messages: Sequence[Message]) -> list[bytes]:
    """For each length from 0 on, a name for the conversation up to there. `root`: what else it depends on."""
    names = [_digest(_dump(root))]
    for message in messages:
        names.append(extend(names[-1], message))
    return names


def extend(name: bytes, message: Message) -> bytes:
    return _digest(name + _dump(_said(message)))


def reasoning_of(message: Message) -> str | None:
    """What it says was thought: in a field, or at the beginning of its content, as some clients write it."""
    for key in REASONING_KEYS:
        if isinstance(text := message.get(key), str) and text.strip():
            return text.strip()
    content = message.get("content") or ""
    return (split_thinking(content).reasoning or None) if content.lstrip().startswith(THINK) else None


def _said(message: Message) -> list[Any]:
    role, text = message["role"], message.get("content") or ""
    if role == "assistant":  # frameworks strip what a model said; nobody else's words are touched
        text = split_thinking(text).said.strip()
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    return [role, text, calls, message.get("name")]


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function", call)
    return [function["name"], _parsed(function.get("arguments"))]


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return _numbers_alike(arguments or {})
    try:
        return _numbers_alike(json.loads(arguments or "{}"))
    except (ValueError, RecursionError):
        return arguments


def _numbers_alike(value: Any) -> Any:
    """1.0 comes back as 1 from languages that have one kind of number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _numbers_alike(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers_alike(item) for item in value]
    return value


def _dump(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()
