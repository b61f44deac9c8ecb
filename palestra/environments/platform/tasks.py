"""Makes tasks from their keys."""

from __future__ import annotations

import random

import msgspec

from palestra.environments.platform.app import SeedSize, TaskTemplate
from palestra.environments.platform.catalog import app_of, template_of
from palestra.environments.platform.difficulty import turned
from palestra.environments.platform.errors import PlatformError, UnknownName
from palestra.environments.platform.failing_tools import failing_variable
from palestra.environments.platform.seeds import seed_of
from palestra.environments.platform.task_records import FIRST_EVAL, MAX_NUMBER, PlatformTask, TaskKey

WORLDS = 64  # seed databases of an app over which tasks are spread: each is built once
MAX_DRAWS = 200


def first_world(key: TaskKey) -> int:
    """Returns the number of the world that is tried first. The task is in this world, unless it is impossible there."""
    return _world(key, template_of(key.app, key.template), _generator(key))


def make_task(key: TaskKey | str, max_draws: int = MAX_DRAWS) -> PlatformTask:
    """Make the task of a key: the same key gives the same task everywhere. Raises PlatformError."""
    key = TaskKey.parse(key) if isinstance(key, str) else key
    app, template = app_of(key.app), template_of(key.app, key.template)
    if key.difficulty != template.difficulty:
        raise UnknownName(f"{key.template} has difficulty {template.difficulty}, not {key.difficulty}")
    if key.number >= MAX_NUMBER:
        raise UnknownName(f"the number of a task must be below {MAX_NUMBER}, found {key.number}")
    rng = _generator(key)
    for _ in range(max_draws):
        seed = seed_of(app, _world(key, template, rng), SeedSize(template.size))
        params = template.params(rng, seed)
        if params is not None:
            prompt = template.prompt(params, rng)
            own = template.variables(params) if template.variables else {}
            variables = {**seed.variables, **own, **failing_variable(template.failing_percent, key.number)}
            made = PlatformTask(
                key=key, app=app, template=template, seed=seed, params=params, prompt=prompt, variables=variables
            )
            return msgspec.structs.replace(made, prompt=turned(made)) if key.knobs else made
    raise PlatformError(f"no valid task was drawn for {key} in {max_draws} attempts")


def draw_task_key(app: str, template: str | None = None, number: int | None = None) -> TaskKey:
    """A task of an app by chance, or of one of its templates, or with this number. Raises UnknownName."""
    templates = [template_of(app, template)] if template else app_of(app).templates
    if not templates:
        raise UnknownName(f"{app} has no tasks")
    chosen = random.choice(templates)
    drawn = random.randrange(FIRST_EVAL) if number is None else number
    return TaskKey(app, chosen.name, chosen.difficulty, drawn)


def _world(key: TaskKey, template: TaskTemplate, rng: random.Random) -> int:
    """Draws the number of a world."""
    is_apart = template.has_own_eval_worlds and key.number >= FIRST_EVAL
    return rng.randrange(WORLDS) + (WORLDS if is_apart else 0)


def _generator(key: TaskKey) -> random.Random:
    return random.Random(str(key.plain))
