"""Converts Anthropic's messages, whose blocks may belong to two roles, to messages of a chat call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from palestra.server.core.errors import ApiError
from palestra.server.core.wire_errors import shown
from palestra.server.model_api.anthropic_messages.errors import wrong
from palestra.server.model_api.openai_chat.messages import MAX_MESSAGES, CallsSoFar, RenderedCall, RenderedFunction
from palestra.server.model_api.openai_chat.pictures import PLACE
from palestra.types.openai import ContentPart
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping, JsonObject

Block = JsonMapping
Content = str | list[ContentPart]

ROLES = ("user", "assistant", "system")
ERROR = "Error: "
"""Prefix of the result of a tool that failed: templates have no other place for it."""
BETWEEN_USERS = "\n\n"


def read_conversation(system: str | list[JsonObject] | None, given: Sequence[Block]) -> list[Message]:
    """Converts a conversation. Neighbouring messages of one role become one turn, e.g. a prefill and its
    continuation."""
    messages: list[Message] = []
    if len(given) > MAX_MESSAGES:
        raise wrong("messages", f"{len(given)} were sent, but at most {MAX_MESSAGES} are allowed")
    if system:
        messages.append({"role": "system", "content": _joined(_blocks(system, "system"), "system")})
    calls = CallsSoFar()
    for i, message in enumerate(given):
        for one in _read(message, f"messages[{i}]"):
            calls.take(one, f"messages[{i}]")
            if messages and one["role"] == messages[-1]["role"] and one["role"] in ("user", "assistant"):
                messages[-1] = _as_one(messages[-1], one)
            else:
                messages.append(one)
    return messages


def _read(message: Block, where: str) -> list[Message]:
    role = message.get("role")
    if role not in ROLES:
        raise wrong(where, f"role is {shown(role)}; it must be one of {', '.join(ROLES)}")
    blocks = _blocks(message.get("content"), f"{where}.content")
    if role == "assistant":
        return [_assistant(blocks, f"{where}.content")]
    if not blocks:
        raise wrong(f"{where}.content", "it is empty; send some text")
    if role == "system":
        return [{"role": "system", "content": _joined(blocks, f"{where}.content")}]
    return _user(blocks, f"{where}.content")


def _user(blocks: Sequence[Block], where: str) -> list[Message]:
    """Converts a user message. Results of tools become messages of their own; text around them stays in its place."""
    messages: list[Message] = []
    for i, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            messages.append(_result(block, f"{where}[{i}]"))
            continue
        content = _content([block], where, first=i)
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] = _followed(messages[-1]["content"], content)
        else:
            messages.append({"role": "user", "content": content})
    return messages


def _result(block: Block, where: str) -> Message:
    content = block.get("content")
    found = "" if content is None else _content(_blocks(content, f"{where}.content"), f"{where}.content")
    is_text = isinstance(found, str)
    if block.get("is_error") and not (is_text and found.startswith(ERROR.rstrip(": "))):
        found = _followed(ERROR, found)
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": found}


def _assistant(blocks: Sequence[Block], where: str) -> Message:
    texts: list[str] = []
    thought: list[str] = []
    calls: list[RenderedCall] = []
    for i, block in enumerate(blocks):
        match block.get("type"):
            case "tool_use":
                calls.append(_call(block, f"{where}[{i}]"))
            case "thinking":
                thought.append(_string(block, "thinking", f"{where}[{i}]"))
            case "redacted_thinking":  # from another server: treated as if the client had left it out
                continue
            case _:
                texts.append(_text(block, f"{where}[{i}]"))
    return _spoken("".join(texts), "\n".join(filter(None, map(str.strip, thought))), calls)


def _spoken(content: str, reasoning: str, calls: list[RenderedCall]) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Block, where: str) -> RenderedCall:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise wrong(where, f"input is {shown(arguments)}; it must be an object")
    function: RenderedFunction = {"name": _string(block, "name", where), "arguments": arguments}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _as_one(first: Message, second: Message) -> Message:
    if first["role"] == "user":
        return {"role": "user", "content": _followed(first["content"], BETWEEN_USERS, second["content"])}
    thought = [text for one in (first, second) if (text := one.get("reasoning_content"))]
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return _spoken(first["content"] + second["content"], "\n".join(thought), calls)


# Blocks


def _blocks(content: object, where: str) -> list[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wrong(where, "it must be a string, or a list of blocks")
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            raise wrong(f"{where}[{i}]", f"{shown(block)} is not a block; it must be an object with a type")
    return content


def _content(blocks: Sequence[Block], where: str, *, first: int = 0) -> Content:
    """Text, or parts of a chat message where there are pictures. `first`: the number of the first block."""
    parts: list[ContentPart] = []
    for i, block in enumerate(blocks, first):
        if block.get("type") == "image":
            at = f"{where}[{i}]"
            parts.append({"type": "image_url", "image_url": {"url": _url(block, at)}, PLACE: at})
        else:
            parts.append({"type": "text", "text": _text(block, f"{where}[{i}]")})
    return _simplest(parts)


def _followed(*contents: Content) -> Content:
    """Contents of one message, one after the other."""
    parts: list[ContentPart] = []
    for content in contents:
        if isinstance(content, str):
            parts.append({"type": "text", "text": content})
        else:
            parts += content
    return _simplest(parts)


def _simplest(parts: list[ContentPart]) -> Content:
    return "".join(part.get("text", "") for part in parts) if all(part["type"] == "text" for part in parts) else parts


def _url(block: Block, where: str) -> str:
    """Returns the URL of a picture; its own bytes are a data: URL."""
    match block.get("source"):
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(url)}:
            return url
    raise wrong(where, 'its source must be {"type": "base64", "media_type": "image/png", "data": …}')


def _joined(blocks: Iterable[Block], where: str) -> str:
    return "".join(_text(block, f"{where}[{i}]") for i, block in enumerate(blocks))


def _text(block: Block, where: str) -> str:
    if block.get("type") != "text":
        raise _misplaced(block, where)
    return _string(block, "text", where)


def _misplaced(block: Block, where: str) -> ApiError:
    kind = block.get("type")
    if kind in ("tool_use", "thinking", "redacted_thinking", "tool_result"):
        speaker = "a user's" if kind == "tool_result" else "an assistant's"
        return wrong(where, f"a block of type {shown(kind)} is allowed only in {speaker} message")
    return wrong(where, f"a block of type {shown(kind)} is not supported here")


def _string(block: Block, key: str, where: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise wrong(where, f"{key} is {shown(value)}; it must be a string")
    return value
