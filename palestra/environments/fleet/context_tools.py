"""Tools with which a model manages its own context: see how full it is, drop old turns, search what was said.

Patterns are plain words, without regard to case; `a|b` finds either. They are not regular expressions, because one can
be written whose search takes for ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from msgspec import Struct

from palestra.environments.fleet.tool_schemas import openai_tool
from palestra.environments.pictures import texts_of
from palestra.types.openai import ChatTool
from palestra.types.rollouts import Message

MAX_MESSAGES, MAX_LINES, SNIPPET = 10, 20, 200
PAGE_SIZE, MAX_PAGE = 50, 500
_INTEGER, _TEXT = {"type": "integer"}, {"type": "string"}

SPECS: list[ChatTool] = [
    openai_tool(name, description, {"properties": properties, "required": required})
    for name, description, properties, required in (
        ("check_context", "See how many turns of the conversation are visible.", {}, []),
        (
            "manage_context",
            "Drop old turns; the task and the most recent turns stay.",
            {"keep_recent_turns": _INTEGER},
            ["keep_recent_turns"],
        ),
        ("search_history", "Search all messages, dropped ones too.", {"pattern": _TEXT}, ["pattern"]),
        ("search_tool_output", "Search the last output that was cut.", {"pattern": _TEXT}, ["pattern"]),
        (
            "view_tool_output",
            "Read a page of the last output that was cut.",
            {"page": _INTEGER, "page_size": _INTEGER},
            ["page"],
        ),
    )
]
NAMES = frozenset(spec["function"]["name"] for spec in SPECS)


class ContextState(Struct, frozen=True):
    """What the tools know of an episode beyond the visible conversation."""

    everything: list[Message]
    cut_output: list[str]
    start: int


class ContextTools:
    """The tools of one episode. `history` is the conversation as the model sees it, and is changed in place."""

    def __init__(self, history: list[Message], max_output_chars: int) -> None:
        self._history = history
        self._everything: list[Message] = list(history)
        self._max_output_chars = max_output_chars
        self._cut_output: list[str] = []
        self._start = len(history)
        """Number of messages before the first turn: they always stay."""

    @property
    def state(self) -> ContextState:
        return ContextState(list(self._everything), list(self._cut_output), self._start)

    def restore(self, state: ContextState) -> None:
        self._everything, self._cut_output = list(state.everything), list(state.cut_output)
        self._start = state.start

    def note(self, messages: Sequence[Message]) -> None:
        """Adds new messages to the full history, so that what is dropped later can still be found."""
        self._everything += messages

    def cut(self, text: str) -> str:
        """Returns the part of an output that the model sees."""
        if len(text) <= self._max_output_chars:
            return text
        self._cut_output = text.splitlines()
        return (
            f"{text[: self._max_output_chars]}\n[Output cut: {self._max_output_chars} of {len(text)} characters, "
            f"{len(self._cut_output)} lines in all. Use search_tool_output or view_tool_output for the rest.]"
        )

    def call(self, name: str, arguments: object) -> tuple[str, bool]:
        """Returns the answer, and whether the history was changed. Raises ValueError for invalid arguments."""
        if not isinstance(arguments, dict):
            raise ValueError("arguments must be an object")
        run: Callable[..., str] = getattr(self, f"_{name}")
        try:
            return run(**arguments), name == "manage_context"
        except TypeError:
            spec = next(spec for spec in SPECS if spec["function"]["name"] == name)
            names = ", ".join(spec["function"].get("parameters", {})["properties"]) or "no arguments"
            raise ValueError(f"{name} takes {names}") from None

    def _check_context(self) -> str:
        total, visible = _turns(self._everything), _turns(self._history)
        return json.dumps({"visible_turns": visible, "total_turns": total, "dropped_turns": total - visible})

    def _manage_context(self, keep_recent_turns: int) -> str:
        kept = 2 * _positive("keep_recent_turns", keep_recent_turns)
        before = len(self._history)
        self._history[self._start :] = self._history[self._start :][-kept:]
        return json.dumps({"dropped_messages": before - len(self._history), "visible_turns": _turns(self._history)})

    def _search_history(self, pattern: str) -> str:
        found = [
            {"index": place, "role": message["role"], "snippet": _snippet(texts_of(message["content"]), pattern)}
            for place, message in enumerate(self._everything[:-1])  # without the message that asks
            if _is_in(pattern, texts_of(message["content"]))
        ]
        return json.dumps({"matches": found[:MAX_MESSAGES], "total": len(found)}, ensure_ascii=False)

    def _search_tool_output(self, pattern: str) -> str:
        found = [
            {"line": place, "text": line[:SNIPPET]}
            for place, line in enumerate(self._output(), 1)
            if _is_in(pattern, line)
        ]
        return json.dumps({"matches": found[:MAX_LINES], "total": len(found)}, ensure_ascii=False)

    def _view_tool_output(self, page: int, page_size: int = PAGE_SIZE) -> str:
        size = min(_positive("page_size", page_size), MAX_PAGE)
        lines = self._output()
        pages = -(-len(lines) // size)
        if _positive("page", page) > pages:
            raise ValueError(f"there are {pages} pages of {size} lines")
        shown = "\n".join(lines[(page - 1) * size : page * size])[: self._max_output_chars]
        return f"Page {page} of {pages}:\n{shown}"

    def _output(self) -> list[str]:
        if not self._cut_output:
            raise ValueError("no output was cut so far")
        return self._cut_output


def _turns(messages: Sequence[Message]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1")
    return value


def _search_terms(pattern: object) -> list[str]:
    if not isinstance(pattern, str) or not pattern.strip("| "):
        raise ValueError("pattern must be text to look for")
    return [word for word in pattern.casefold().split("|") if word]


def _is_in(pattern: object, text: object) -> bool:
    folded = str(text).casefold()
    return any(word in folded for word in _search_terms(pattern))


def _snippet(text: object, pattern: str) -> str:
    shown, folded = str(text), str(text).casefold()
    first = min(place for word in _search_terms(pattern) if (place := folded.find(word)) >= 0)
    start = max(0, min(first - SNIPPET // 4, len(shown) - SNIPPET))
    return shown[start : start + SNIPPET]
