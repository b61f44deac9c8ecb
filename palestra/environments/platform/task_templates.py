"""The parts of task templates: prompts, calls, answers.

A template is `@template(...)` on its solution; the function's name is the template's and the key in `prompts.toml`.
Prompts are drawn by position: new ones go to the end, or tasks change. A template that an app gains (also one of its
`sub_goals`) changes the app's long tasks, which are drawn from all of them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Generator, Sequence
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias, TypeVar

import msgspec

from palestra.environments.platform.expectations import normal
from palestra.util.json_types import JsonObject

Params = JsonObject
"""Plain JSON, because it is part of an exported task."""


class SolutionCall(msgspec.Struct, frozen=True):
    """A tool call of a task's own solution."""

    tool: str
    arguments: JsonObject = {}


T = TypeVar("T")
SolutionPart: TypeAlias = Generator[SolutionCall, JsonObject, T]
"""Yields calls and receives their results; returns what a solution goes on with."""
Solution = SolutionPart[None]
"""Yields calls and receives their results."""


@cache
def read_prompts(package: str) -> dict[str, tuple[str, ...]]:
    """The prompts of an app by template, from its `prompts.toml`."""
    text = files(package).joinpath("prompts.toml").read_text(encoding="utf-8")
    return {name: tuple(prompts) for name, prompts in tomllib.loads(text).items()}


def read_pages(tool: str, rows: str, **arguments: object) -> SolutionPart[list[Params]]:
    """Reads all pages of a tool's result under this name."""
    found: list[Params] = []
    while True:
        page = yield SolutionCall(tool, arguments)
        found += page[rows]
        if page.get("next_cursor") is None:
            return found
        arguments = arguments | {"cursor": page["next_cursor"]}


class AnswerKind(StrEnum):
    """How an answer is parsed before it is compared."""

    INTEGER = "integer"
    MONEY = "money"
    """An amount in cents, parsed from 12.34, $12.34, 1,234.50."""
    NAME = "name"
    """Words, compared without regard to case and spaces."""
    SET = "set"
    """Names separated by commas, in any order."""


class ExpectedAnswer(msgspec.Struct, frozen=True):
    """The answer that a task asks for, and how a given one is compared with it."""

    kind: AnswerKind
    value: Any

    def is_met(self, given: str | None) -> bool:
        """Whether the whole text is the answer: a text that contains it among others is a guess."""
        if given is None:
            return False
        try:
            return _READERS[self.kind](given) == _READERS[self.kind](self.text)
        except ValueError:
            return False

    @property
    def text(self) -> str:
        """Returns the answer as a solution gives it."""
        match self.kind:
            case AnswerKind.MONEY:
                return f"{self.value // 100}.{self.value % 100:02d}"
            case AnswerKind.SET:
                return ",".join(self.value)
            case _:
                return str(self.value)


def _integer(text: str) -> int:
    return int(normal(text).replace(",", ""))


def _money(text: str) -> int:
    found = re.fullmatch(r"[$€]?\s*([\d,]+)(?:\.(\d{2}))?\s*(?:usd|eur|[$€])?", normal(text))
    if found is None:
        raise ValueError(f"{text!r} is no amount")
    return int(found[1].replace(",", "")) * 100 + int(found[2] or 0)


def _set(text: str) -> frozenset[str]:
    return frozenset(normal(part) for part in text.split(",") if part.strip())


_READERS: dict[AnswerKind, Callable[[str], Any]] = {
    AnswerKind.INTEGER: _integer,
    AnswerKind.MONEY: _money,
    AnswerKind.NAME: normal,
    AnswerKind.SET: _set,
}


class TemplateEvent(msgspec.Struct, frozen=True):
    turn: int
    tool: str
    arguments: Any
    error: str
    """The error code; empty if there was no error."""


class RequiredCalls(msgspec.Struct, frozen=True):
    """Tools that must have been called successfully. Plain data, because it is part of an exported task."""

    tools: tuple[str, ...]
    only: bool = False
    """In this order, and nothing else."""

    def is_met(self, events: Sequence[TemplateEvent]) -> bool:
        if self.only:
            return [(event.tool, event.error) for event in events] == [(tool, "") for tool in self.tools]
        worked = {event.tool for event in events if not event.error}
        return all(tool in worked for tool in self.tools)
