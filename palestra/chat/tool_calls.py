"""Tool calls in what a model wrote: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; and what it only thought.

Owns: finding calls, saying why a try at one is none, how deep JSON may be nested. Never touches: which tools exist,
what becomes of a call.
"""

from __future__ import annotations

import json
import math
from typing import Any

from msgspec import Struct

from palestra.util.json_types import JsonObject

MAX_DEPTH = 100  # nobody means more; a few hundred, and whatever recurses over it fails


def is_too_deep(value: object) -> bool:
    """Level by level: nothing here recurses."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _items(outer) if isinstance(inner, dict | list)]
    return bool(level)


def _items(outer: object) -> Any:
    return outer.values() if isinstance(outer, dict) else outer


TAGS = ("<tool_call>", "<function_call>")
"""In the order they are tried: the first that holds a call wins."""
ARGUMENTS = ("arguments", "parameters", "params")
"""Keys that models write for them."""
THINK, END_THINK = "<think>", "</think>"
SHOWN = 40  # characters of the model's own text in a reason: enough to find the place


class ParsedCall(Struct, frozen=True, kw_only=True):
    """A tool call that was read from what a model wrote."""

    name: str
    arguments: JsonObject


class ParseFailure(Struct, frozen=True, kw_only=True):
    """Why what a model wrote is no tool call."""

    reason: str
    """One line, for the model to read."""


def parse_tool_call(text: str) -> ParsedCall | ParseFailure | None:
    """The first call in `text`; None where it does not try to make one. What it only thought about does not count."""
    said = without_thinking(text)
    failure: ParseFailure | None = None
    for tag in TAGS:
        start = said.find(tag)
        if start < 0:
            continue
        found = _read_block(said, start + len(tag), tag)
        if isinstance(found, ParsedCall):
            return found
        failure = failure or found
    return failure


def closing_of(tag: str) -> str:
    return tag.replace("<", "</")


def read_json(text: str) -> object:
    """None where it cannot be read, or only by those who can follow any depth; no call is null either."""
    try:
        value, end = _decode(text, 0)
    except (ValueError, RecursionError):
        return None
    return None if text[end:].strip() or is_too_deep(value) else value


def call_of(value: object) -> ParsedCall | None:
    """What a model wrote as JSON."""
    call = _checked(value, "")
    return call if isinstance(call, ParsedCall) else None


def without_thinking(text: str) -> str:
    """`text` without its closed think blocks. One that a tool call stands before is part of an argument, and stays; an
    end without a beginning closes a block that the chat template opened."""
    said: list[str] = []
    place, orphan = 0, text.find(END_THINK)
    if orphan >= 0 and THINK not in text[:orphan] and not _is_quoted(text, orphan):
        place = orphan + len(END_THINK)
    while (start := text.find(THINK, place)) >= 0 and (end := text.find(END_THINK, start)) >= 0:
        before = text[place:start]
        if any(tag in before for tag in TAGS):
            break
        said.append(before)
        place = end + len(END_THINK)
    return "".join(said) + text[place:]


def _is_quoted(text: str, place: int) -> bool:
    """Within the JSON of a call."""
    starts = [text.find(tag, 0, place) + len(tag) for tag in TAGS if tag in text[:place]]
    return any(_end_of_json(text, start) > place for start in starts)


def _end_of_json(text: str, start: int) -> int:
    """0 where there is none."""
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
    """The value and where it ends. The decoder finds that itself, so an argument may hold a closing tag."""
    while start < len(text) and text[start].isspace():
        start += 1
    value, end = _DECODER.raw_decode(text, start)
    if "\\u" in text[start:end]:
        _refuse_half_characters(value)
    return value, end


def _refuse_half_characters(value: object) -> None:
    """A lone surrogate is no text: whoever sends it on would fail."""
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
