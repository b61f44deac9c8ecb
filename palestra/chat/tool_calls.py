"""Finds tool calls in model output: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; ignores those in its
reasoning.
"""

from __future__ import annotations

import json
import math
from typing import Any

from msgspec import Struct

from palestra.util.json_types import JsonObject

MAX_DEPTH = 100  # no real call is deeper; at a few hundred, recursive code fails


def is_too_deep(value: object) -> bool:
    """Whether a value is nested too deeply. Works level by level, without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _items(outer) if isinstance(inner, dict | list)]
    return bool(level)


def _items(outer: object) -> Any:
    return outer.values() if isinstance(outer, dict) else outer


TAGS = ("<tool_call>", "<function_call>")
"""Tags in the order they are tried: the first that contains a call wins."""
ARGUMENTS = ("arguments", "parameters", "params")
"""Keys that models use for the arguments."""
THINK, END_THINK = "<think>", "</think>"
SHOWN = 40  # characters of the model's text in a reason: enough to find the place


class ParsedCall(Struct, frozen=True, kw_only=True):
    """A tool call that was parsed from model output."""

    name: str
    arguments: JsonObject


class ParseFailure(Struct, frozen=True, kw_only=True):
    """Why an output is not a valid tool call."""

    reason: str
    """One line, for the model to read."""


def parse_tool_call(text: str) -> ParsedCall | ParseFailure | None:
    """Returns the first call in `text`; None if there is no attempt at one. Calls in the reasoning do not count."""
    visible = without_thinking(text)
    failure: ParseFailure | None = None
    for tag in TAGS:
        start = visible.find(tag)
        if start < 0:
            continue
        found = _read_block(visible, start + len(tag), tag)
        if isinstance(found, ParsedCall):
            return found
        failure = failure or found
    return failure


def closing_of(tag: str) -> str:
    return tag.replace("<", "</")


def read_json(text: str) -> object:
    """Returns the parsed JSON; None if it is invalid, null or nested too deeply."""
    try:
        value, end = _decode(text, 0)
    except (ValueError, RecursionError):
        return None
    return None if text[end:].strip() or is_too_deep(value) else value


def call_of(value: object) -> ParsedCall | None:
    """Converts JSON that a model wrote to a call."""
    call = _checked(value, "")
    return call if isinstance(call, ParsedCall) else None


def without_thinking(text: str) -> str:
    """Returns `text` without its closed think blocks. A block after the beginning of a tool call is part of an argument
    and stays; an end tag without a beginning closes a block that the chat template opened."""
    visible: list[str] = []
    place, orphan = 0, text.find(END_THINK)
    if orphan >= 0 and THINK not in text[:orphan] and not _is_quoted(text, orphan):
        place = orphan + len(END_THINK)
    while (start := text.find(THINK, place)) >= 0 and (end := text.find(END_THINK, start)) >= 0:
        before = text[place:start]
        if any(tag in before for tag in TAGS):
            break
        visible.append(before)
        place = end + len(END_THINK)
    return "".join(visible) + text[place:]


def _is_quoted(text: str, place: int) -> bool:
    """Whether the place is within the JSON of a call."""
    starts = [text.find(tag, 0, place) + len(tag) for tag in TAGS if tag in text[:place]]
    return any(_end_of_json(text, start) > place for start in starts)


def _end_of_json(text: str, start: int) -> int:
    """Returns where the JSON ends; 0 if there is none."""
    try:
        return _decode(text, start)[1]
    except (ValueError, RecursionError):
        return 0


def _read_block(text: str, start: int, tag: str) -> ParsedCall | ParseFailure:
    try:
        call, end = _decode(text, start)
    except json.JSONDecodeError as error:
        at = f" at {text[error.pos : error.pos + SHOWN]!r}" if error.pos < len(text) else " at the end of the text"
        return ParseFailure(reason=f"what follows {tag} is not valid JSON: {error.msg}{at}")
    except (ValueError, RecursionError) as error:
        return ParseFailure(reason=f"what follows {tag} cannot be read: {_one_line(error)}")
    rest = text[end:].lstrip()
    if rest and not rest.startswith("<"):
        return ParseFailure(reason=f"text follows the JSON object in {tag}: {rest[:SHOWN]!r}")
    return _checked(call, tag)


def _checked(call: object, tag: str) -> ParsedCall | ParseFailure:
    if not isinstance(call, dict):
        return ParseFailure(reason=f"{tag} holds a JSON {_kind(call)}, not an object")
    name = call.get("name") or call.get("tool")
    if not isinstance(name, str):
        problem = "no 'name'" if name is None else f"a {_kind(name)} as 'name', not a string"
        return ParseFailure(reason=f"the object in {tag} has {problem}")
    arguments = next((given for key in ARGUMENTS if (given := call.get(key))), {})
    if not isinstance(arguments, dict):
        return ParseFailure(reason=f"'arguments' of {name!r} is a {_kind(arguments)}, not an object")
    return ParsedCall(name=name, arguments=arguments)


def _decode(text: str, start: int) -> tuple[Any, int]:
    """Returns the value and where it ends. The decoder finds the end itself, so an argument may contain a closing
    tag."""
    while start < len(text) and text[start].isspace():
        start += 1
    value, end = _DECODER.raw_decode(text, start)
    if "\\u" in text[start:end]:
        _refuse_half_characters(value)
    return value, end


def _refuse_half_characters(value: object) -> None:
    """Refuses a lone surrogate: it is not valid text, and encoding it would fail later."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a \\ud8xx escape without its second half") from None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits[:SHOWN]} is too large for a number")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)

_KINDS = {str: "string", list: "list", dict: "object", bool: "boolean", type(None): "null"}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "number")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
