"""Players who do not solve a task of the platform: what they leave must be worth nothing.

Owns: doing nothing, answering by chance, calls by chance, a change that nobody asked for. Never touches: verdicts.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from palestra.environments.platform.app import SeedDatabase
from palestra.environments.platform.changes import tables_of
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.golden import play_golden
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.task_records import PlatformTask
from palestra.environments.platform.tool_schemas import PlatformTool
from palestra.environments.random_calls import random_arguments

Attacker = Callable[[PlatformTask, Instance], str | None]
"""Plays a task in an instance and returns the answer that it gives."""
CALLS = 60
"""So many that the call which is wanted, hit on by luck, is not the only one that did something."""
STRAY_DRAWS = 200
LONGEST_WORD = 40  # characters

_words: dict[str, list[str]] = {}
"""Texts of each world, by its digest."""


def nothing(_task: PlatformTask, _instance: Instance) -> None:
    return None


def answer_only(task: PlatformTask, _instance: Instance) -> str:
    """Gives an answer of the right form, and does nothing."""
    return "done" if task.template.answer is None else "0"


def random_calls(task: PlatformTask, instance: Instance) -> None:
    rng = random.Random(str(task.key))
    for _ in range(CALLS):
        random_call(rng, task, instance, task.app.tools)


def random_call(rng: random.Random, task: PlatformTask, instance: Instance, tools: Sequence[PlatformTool]) -> None:
    """Makes a call that the schema of its tool allows, with words that occur in this world."""
    tool = rng.choice(tools)
    instance.call(tool.name, random_arguments(rng, tool.parameters, words_of(task.seed)))


def stray_write(task: PlatformTask, instance: Instance) -> None:
    """Does what another task of the same world asks for. Raises PlatformError if nothing comes of any."""
    before, rng = instance.changes(), random.Random(str(task.key))
    for _ in range(STRAY_DRAWS):
        template = rng.choice(task.app.templates)
        params = template.params(rng, task.seed)
        if params is not None:
            # a solution need not work in a world that has changed
            with contextlib.suppress(PlatformError, LookupError, ValueError, RuntimeError):
                play_golden(replace(task, template=template, params=params), instance)
        if instance.changes() != before:
            return
    raise PlatformError(f"no task of {task.app.key} changes anything in the world of {task.key}")


def words_of(seed: SeedDatabase) -> Sequence[str]:
    """Returns the short texts in all tables of a world."""
    if seed.digest not in _words:
        tables = [table.name for table in tables_of(seed.connection)]
        values = {value for name in tables for row in seed.rows(f"SELECT * FROM {name}") for value in row.values()}
        _words[seed.digest] = sorted(one for one in values if isinstance(one, str) and 0 < len(one) <= LONGEST_WORD)
    return _words[seed.digest]
