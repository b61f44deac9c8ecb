"""Tasks and their keys.

A key is:

    mail-move_only-0-17         app, template, difficulty, random number
    mail-move_only-0-17.hint    and a knob on its difficulty
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from palestra.environments.platform.app import SeedDatabase, TaskApp, TaskTemplate
from palestra.environments.platform.errors import UnknownName
from palestra.util.json_types import JsonObject

FIRST_EVAL = 2**31  # random numbers from here on are for evaluation
MAX_NUMBER = 2**32


class DifficultyKnob(StrEnum):
    HINT = "hint"
    NOISE = "noise"


class TaskKey(msgspec.Struct, frozen=True):
    """Identifies a task everywhere: app, template, difficulty, number, and modifiers of the difficulty."""

    app: str
    template: str
    difficulty: str
    number: int
    knobs: tuple[DifficultyKnob, ...] = ()

    def __str__(self) -> str:
        plain = f"{self.app}-{self.template}-{self.difficulty}-{self.number}"
        return ".".join([plain, *self.knobs])

    @property
    def plain(self) -> TaskKey:
        """Returns the key without modifiers, from which the task is made."""
        return msgspec.structs.replace(self, knobs=())

    @classmethod
    def parse(cls, text: str) -> TaskKey:
        found = re.fullmatch(r"([a-z]+)-([a-z0-9_]+)-(\d[a-z]?)-(\d{1,10})((?:\.[a-z]+)*)", text)
        if found is None:
            raise UnknownName(f"{text!r} is not a task key; write it like keys-put_number-0b-17")
        return cls(found[1], found[2], found[3], int(found[4]), knobs_of(found[5].split(".")[1:]))

    @property
    def split(self) -> str:
        return "train" if self.number < FIRST_EVAL else "eval"


def knobs_of(names: Sequence[str]) -> tuple[DifficultyKnob, ...]:
    """Returns modifiers in one order, so that a task has one key."""
    known = [knob for knob in DifficultyKnob if knob in names]
    if [*names] != known:
        raise UnknownName(
            f"{'.'.join(names)!r} are not difficulty knobs of a task; there are "
            f"{', '.join(DifficultyKnob)}, each once, in this order"
        )
    return tuple(known)


class PlatformTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task, made from its key."""

    key: TaskKey
    app: TaskApp
    template: TaskTemplate
    seed: SeedDatabase
    params: JsonObject
    prompt: str
    variables: Mapping[str, str]
