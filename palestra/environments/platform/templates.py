"""Task templates: from a random number and a seed to a prompt, a solution and what it must come to.

Owns: the shape of a template, typed answers. Never touches: instances, verdicts.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from enum import StrEnum
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from palestra.environments.platform.expectations import Expected, normal

if TYPE_CHECKING:
    from palestra.environments.platform.instance import Event
    from palestra.environments.platform.seeds import Seed

Params = dict[str, Any]
"""Plain JSON: it is part of an exported task."""


class Call(msgspec.Struct, frozen=True):
    tool: str
    arguments: dict[str, Any] = {}


Solution = Generator[Call, dict[str, Any], None]
"""Yields calls, is sent their results."""


def read_prompts(package: str) -> dict[str, tuple[str, ...]]:
    """Of an app, by template: its `prompts.toml`."""
    text = files(package).joinpath("prompts.toml").read_text(encoding="utf-8")
    return {name: tuple(prompts) for name, prompts in tomllib.loads(text).items()}


def solution(*calls: Call) -> Solution:
    """One that needs no results."""
    for call in calls:
        _ = yield call


class AnswerKind(StrEnum):
    INTEGER = "integer"
    MONEY = "money"
    """In cents; read from 12.34, $12.34, 1,234.50."""
    NAME = "name"
    """Words, compared without regard to capitals and spaces."""
    SET = "set"
    """Names separated by commas, in any order."""


class Answer(msgspec.Struct, frozen=True):
    kind: AnswerKind
    value: Any

    def is_met(self, given: str | None) -> bool:
        """The whole text is the answer: one that contains it among others is a guess."""
        if given is None:
            return False
        try:
            return _READERS[self.kind](given) == _READERS[self.kind](self.text)
        except ValueError:
            return False

    @property
    def text(self) -> str:
        """As a solution gives it."""
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


class Calls(msgspec.Struct, frozen=True):
    """Tools that must have been called, and worked. Plain data: an exported task says it, too."""

    tools: tuple[str, ...]
    only: bool = False
    """In this order, and nothing else."""

    def is_met(self, events: Sequence[Event]) -> bool:
        if self.only:
            return [(event.tool, event.error) for event in events] == [(tool, "") for tool in self.tools]
        worked = {event.tool for event in events if not event.error}
        return all(tool in worked for tool in self.tools)


class TaskTemplate(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    difficulty: str
    """0a to 0d for the tiny ladder, then 0, 1, 2, 3."""
    params: Callable[[random.Random, Seed], Params | None]
    """None where this draw does not do: there is no such row, or more than one. Another is drawn."""
    prompts: Sequence[str]
    """Paraphrases, with `{names}` of the params."""
    solve: Callable[[Params], Solution]
    expect: Callable[[Params, Seed], list[Expected]]
    """Of the state in the end; empty: nothing may change."""
    answer: Callable[[Params], Answer] | None = None
    process: Callable[[Params], Calls] | None = None
    """What must have been called, for tasks that only read."""
    must_not: bool = False
    """The data asks for what must not be done."""
    size: str = "small"
    max_turns: int = 10

    def prompt(self, params: Mapping[str, Any], rng: random.Random) -> str:
        return rng.choice(self.prompts).format_map(params)
