"""Tool calls in what a model wrote: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; and what it only thought.

Owns: finding calls, and saying why a try at one is none. Never touches: which tools exist, what becomes of a call.
"""

from __future__ import annotations

import json
from typing import Any

from msgspec import Struct

TAGS = ("<tool_call>", "<function_call>")
"""In the order they are tried: the first that holds a call wins."""
THINK, END_THINK = "<think>", "</think>"
SHOWN = 40  # characters of the model's own text in a reason: enough to find the place


class ParsedCall(Struct, frozen=True, kw_only=True):
    name: str
    arguments: dict[str, Any]


class ParseFailure(Struct, frozen=True, kw_only=True):
    reason: str
    """One line, for the model to read."""


class Spoken(Struct, frozen=True, kw_only=True):
    """What a model wrote, taken apart."""

    reasoning: str | None
    """Its thinking, block after block; None where it wrote none."""
    said: str


class ParsedCalls(Struct, frozen=True, kw_only=True):
    text: str
    """What stands around the calls, with those that could not be read."""
    calls: list[ParsedCall]


def parse_tool_call(text: str) -> ParsedCall | ParseFailure | None:
    """The first call in `text`; None where it does not try to make one. What it only thought about does not count."""
    said = without_thinking(text)
    failure: ParseFailure | None = None
    for tag in TAGS:
        start = said.find(tag)
        if start < 0:
            continue
        found = _read_block(said, start + len(tag), tag).call
        if isinstance(found, ParsedCall):
            return found
        failure = failure or found
    return failure


def parse_tool_calls(text: str) -> ParsedCalls:
    """Every call in `text`, thinking included: split that off first. Within a block that cannot be read nothing is
    looked for: what stands in there may be an argument."""
    calls: list[ParsedCall] = []
    around: list[str] = []
    place = 0
    while (tag := _next_tag(text, place)) is not None:
        start = text.find(tag, place)
        closing = tag.replace("<", "</")
        found = _read_block(text, start + len(tag), tag)
        if isinstance(found.call, ParsedCall):
            calls.append(found.call)
            around.append(text[place:start])
            after = len(text) - len(text[found.end :].lstrip())
            place = after + len(closing) if text.startswith(closing, after) else found.end
        else:
            end = text.find(closing, start)
            after = len(text) if end < 0 else end + len(closing)
            around.append(text[place:after])
            place = after
    return ParsedCalls(text="".join([*around, text[place:]]), calls=calls)


def without_thinking(text: str) -> str:
    """`text` after its closed think blocks."""
    return split_thinking(text).said


def split_thinking(text: str) -> Spoken:
    """Closed think blocks apart from the rest. One that a tool call stands before is part of an argument, and stays;
    an end without a beginning closes a block that the chat template opened."""
    thoughts: list[str] = []
    orphan = text.find(END_THINK)
    if orphan >= 0 and THINK not in text[:orphan] and not _is_quoted(text, orphan):
        thoughts.append(text[:orphan])
        text = text[orphan + len(END_THINK) :]
    while (start := text.find(THINK)) >= 0:
        end = text.find(END_THINK, start)
        if end < 0 or any(0 <= text.find(tag) < start for tag in TAGS):
            break
        thoughts.append(text[start + len(THINK) : end])
        text = text[:start] + text[end + len(END_THINK) :]
    reasoning = "\n".join(thought.strip() for thought in thoughts) if thoughts else None
    return Spoken(reasoning=reasoning, said=text)


def split_open_thinking(text: str) -> Spoken:
    """As `split_thinking`; a block at the beginning that nothing closes ends at the first tool call, or never."""
    spoken = split_thinking(text)
    if not spoken.said.lstrip().startswith(THINK):
        return spoken
    tag = _next_tag(spoken.said, 0)
    end = len(spoken.said) if tag is None else spoken.said.find(tag)
    thought = spoken.said[:end].lstrip().removeprefix(THINK).strip()
    earlier = "" if spoken.reasoning is None else f"{spoken.reasoning}\n"
    return Spoken(reasoning=earlier + thought, said=spoken.said[end:])


def _next_tag(text: str, start: int) -> str | None:
    found = {tag: place for tag in TAGS if (place := text.find(tag, start)) >= 0}
    return min(found, key=lambda tag: found[tag], default=None)


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


class _Block(Struct, frozen=True):
    call: ParsedCall | ParseFailure
    end: int = 0
    """Of its JSON."""


def _read_block(text: str, start: int, tag: str) -> _Block:
    try:
        call, end = _decode(text, start)
    except json.JSONDecodeError as error:
        at = f" at {text[error.pos : error.pos + SHOWN]!r}" if error.pos < len(text) else " at the end of the text"
        return _Block(ParseFailure(reason=f"what follows {tag} is not valid JSON: {error.msg}{at}"))
    except (ValueError, RecursionError) as error:
        return _Block(ParseFailure(reason=f"what follows {tag} cannot be read: {_one_line(error)}"))
    rest = text[end:].lstrip()
    if rest and not rest.startswith("<"):
        return _Block(ParseFailure(reason=f"text follows the JSON object in {tag}: {rest[:SHOWN]!r}"))
    return _Block(_checked(call, tag), end)


def _checked(call: Any, tag: str) -> ParsedCall | ParseFailure:
    if not isinstance(call, dict):
        return ParseFailure(reason=f"{tag} holds a JSON {_kind(call)}, not an object")
    name = call.get("name") or call.get("tool")
    if not isinstance(name, str):
        problem = "no 'name'" if name is None else f"a {_kind(name)} as 'name', not a string"
        return ParseFailure(reason=f"the object in {tag} has {problem}")
    arguments = call.get("arguments") or call.get("params") or {}
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


def _refuse_half_characters(value: Any) -> None:
    """A lone surrogate is no text: whoever sends it on would fail."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a \\ud8xx escape without its second half") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)

_KINDS = {str: "string", list: "list", dict: "object", bool: "boolean", type(None): "null"}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "number")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
