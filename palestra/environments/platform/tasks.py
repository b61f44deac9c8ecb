"""Tasks by their key: any key can be made again from nothing.

    mail-move_only-0-17         app, template, difficulty, random number
    mail-move_only-0-17.hint    and a knob on its difficulty

Owns: keys, splits, drawing until a task is sound. Never touches: instances.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from palestra.environments.platform.app import App, Size
from palestra.environments.platform.catalog import app_of, template_of
from palestra.environments.platform.errors import PlatformError, UnknownName
from palestra.environments.platform.knobs import Knob, turned
from palestra.environments.platform.seeds import Seed, seed_of
from palestra.environments.platform.templates import TaskTemplate

WORLDS = 64  # seeds of an app that tasks are spread over: each is built once
FIRST_EVAL = 2**31  # random numbers from here on are for evaluation
MAX_NUMBER = 2**32
MAX_DRAWS = 200


class TaskKey(msgspec.Struct, frozen=True):
    app: str
    template: str
    difficulty: str
    number: int
    knobs: tuple[Knob, ...] = ()

    def __str__(self) -> str:
        plain = f"{self.app}-{self.template}-{self.difficulty}-{self.number}"
        return ".".join([plain, *self.knobs])

    @property
    def plain(self) -> TaskKey:
        """Without knobs: what the task is made from."""
        return msgspec.structs.replace(self, knobs=())

    @classmethod
    def parse(cls, text: str) -> TaskKey:
        found = re.fullmatch(r"([a-z]+)-([a-z0-9_]+)-(\d[a-z]?)-(\d{1,10})((?:\.[a-z]+)*)", text)
        if found is None:
            raise UnknownName(f"{text!r} is no task key; one looks like keys-put_number-0b-17")
        return cls(found[1], found[2], found[3], int(found[4]), knobs_of(found[5].split(".")[1:]))

    @property
    def split(self) -> str:
        return "train" if self.number < FIRST_EVAL else "eval"


def knobs_of(names: Sequence[str]) -> tuple[Knob, ...]:
    """One order only, so that a task has one key."""
    known = [knob for knob in Knob if knob in names]
    if [*names] != known:
        raise UnknownName(
            f"{'.'.join(names)!r} are no knobs of a task; there are {', '.join(Knob)}, each once, in this order"
        )
    return tuple(known)


class PlatformTask(msgspec.Struct, frozen=True, kw_only=True):
    key: TaskKey
    app: App
    template: TaskTemplate
    seed: Seed
    params: dict[str, Any]
    prompt: str
    variables: Mapping[str, str]


def first_world(key: TaskKey) -> int:
    """The number of the world that a task is drawn in first. It is its own, unless no such task can be set there."""
    return _generator(key).randrange(WORLDS)


def make_task(key: TaskKey | str, max_draws: int = MAX_DRAWS) -> PlatformTask:
    key = TaskKey.parse(key) if isinstance(key, str) else key
    app, template = app_of(key.app), template_of(key.app, key.template)
    if key.difficulty != template.difficulty:
        raise UnknownName(f"{key.template} has difficulty {template.difficulty}, not {key.difficulty}")
    if key.number >= MAX_NUMBER:
        raise UnknownName(f"the number of a task is below {MAX_NUMBER}, found {key.number}")
    rng = _generator(key)
    for _ in range(max_draws):
        seed = seed_of(app, rng.randrange(WORLDS), Size(template.size))
        params = template.params(rng, seed)
        if params is not None:
            prompt = template.prompt(params, rng)
            made = PlatformTask(
                key=key, app=app, template=template, seed=seed, params=params, prompt=prompt, variables=seed.variables
            )
            return msgspec.structs.replace(made, prompt=turned(made)) if key.knobs else made
    raise PlatformError(f"no sound task came of {key} in {max_draws} draws")


def _generator(key: TaskKey) -> random.Random:
    return random.Random(str(key.plain))
