"""Parses the model's text as an action: a tool call, the end, both, or neither.

`lenient` is our own: a call in the reasoning does not count, the end of JSON is found by parsing it, and an unreadable
call is answered with the reason. `strict` accepts exactly what the reference implementation does.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Any

import msgspec

from palestra.chat.tool_calls import TAGS, ParsedCall, closing_of, parse_tool_call, without_thinking

DONE = re.compile(r"<done>|\[done\]", re.IGNORECASE)
OPEN_THINK = "<think>"


class ActionGrammar(StrEnum):
    LENIENT = "lenient"
    STRICT = "strict"


class CallRequest(msgspec.Struct, frozen=True):
    name: Any
    """Text, except for what the strict grammar lets through."""
    arguments: Any


class AgentAction(msgspec.Struct, frozen=True, kw_only=True):
    call: CallRequest | None = None
    is_done: bool = False
    problem: str = ""
    """Why an attempt at a call is invalid, for the model to read."""
    ignored_calls: int = 0
    """Number of calls after the first: only the first is run."""


def parse_action(text: str, grammar: ActionGrammar = ActionGrammar.LENIENT) -> AgentAction:
    visible = without_thinking(text)
    outside, calls = _outside_calls(visible)
    is_done = DONE.search(outside) is not None
    if grammar is ActionGrammar.STRICT:
        return AgentAction(call=_strict_call(text), is_done=is_done)
    found = parse_tool_call(text)
    if isinstance(found, ParsedCall):
        call = CallRequest(found.name, found.arguments)
        return AgentAction(call=call, is_done=is_done, ignored_calls=max(calls - 1, 0))
    return AgentAction(is_done=is_done, problem=found.reason if found else "")


def _outside_calls(visible: str) -> tuple[str, int]:
    """Returns the text without calls and unfinished reasoning, and the number of calls."""
    outside: list[str] = []
    place, count = 0, 0
    while (found := _next_tag(visible, place)) is not None:
        start, tag = found
        outside.append(visible[place:start])
        place, count = _end_of_call(visible, start + len(tag), closing_of(tag)), count + 1
    return ("".join(outside) + visible[place:]).partition(OPEN_THINK)[0], count


def _next_tag(visible: str, place: int) -> tuple[int, str] | None:
    found = [(start, tag) for tag in TAGS if (start := visible.find(tag, place)) >= 0]
    return min(found, default=None)


def _end_of_call(visible: str, start: int, closing: str) -> int:
    """Returns where a call ends: after its JSON, if that can be parsed, because a quoted closing tag does not count.
    Else after the tag, or nowhere."""
    try:
        end = json.JSONDecoder().raw_decode(visible, start + len(visible[start:]) - len(visible[start:].lstrip()))[1]
    except (ValueError, RecursionError):
        end = start
    closed = visible.find(closing, end)
    is_next = closed >= 0 and (end == start or not visible[end:closed].strip())
    return closed + len(closing) if is_next else (end if end > start else len(visible))


def _strict_call(text: str) -> CallRequest | None:
    for tag in TAGS:
        content = _strict_content(text, tag)
        if content is None:
            continue
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and (name := found.get("name") or found.get("tool")):
            return CallRequest(name, found.get("arguments") or found.get("params") or {})
    return None


def _strict_content(text: str, tag: str) -> str | None:
    """Returns the text up to the first closing tag; if there is none, up to a special token or the end."""
    start = text.find(tag)
    if start < 0:
        return None
    rest = text[start + len(tag) :]
    closed = rest.find(closing_of(tag))
    return rest[:closed] if closed >= 0 else rest.partition("<|")[0]
