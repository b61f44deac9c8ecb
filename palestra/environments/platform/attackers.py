"""Players who do not solve a task of the platform: what they leave must be worth nothing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from palestra.environments.platform.app import SeedDatabase
from palestra.environments.platform.changes import tables_of
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.golden import play_golden, play_solution
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.task_records import PlatformTask
from palestra.environments.platform.task_templates import Solution
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
                if task.app.has_users:
                    _play_anyway(template.solve(params), instance)
                else:
                    play_golden(replace(task, template=template, params=params), instance)
        if instance.changes() != before:
            return
    raise PlatformError(f"no task of {task.app.key} changes anything in the world of {task.key}")


def _play_anyway(solving: Solution, instance: Instance) -> None:
    """Plays a solution for a user who is not on the line: whatever the one who is says."""
    call = next(solving)
    with contextlib.suppress(StopIteration):
        while True:
            result = instance.call(call.tool, call.arguments)
            call = solving.send(msgspec.json.decode(result.text))


def all_but_one(task: PlatformTask, instance: Instance) -> None:
    """Does all sub-goals but one."""
    solutions = _solutions(task)
    left_out = random.Random(str(task.key)).randrange(len(solutions))
    for number, solving in enumerate(solutions):
        if number != left_out:
            play_solution(solving, instance)


def only_one(task: PlatformTask, instance: Instance) -> None:
    """Does one sub-goal, and then says that all is done."""
    play_solution(random.Random(str(task.key)).choice(_solutions(task)), instance)


def wrong_record(task: PlatformTask, instance: Instance) -> None:
    """Does all sub-goals, but one of them with something else than what was asked for: the first for which this world
    has another. Raises PlatformError if it has for none."""
    rng, solutions = random.Random(str(task.key)), _solutions(task)
    numbers = rng.sample(range(len(solutions)), len(solutions))
    assert task.template.goals is not None
    drawn = ((number, task.template.goals.another(rng, task.params, task.seed, number)) for number in numbers)
    wrong, other = next(((number, other) for number, other in drawn if other is not None), (None, None))
    if other is None:
        raise PlatformError(f"the world of {task.key} has nothing else that its sub-goals could be about")
    for number, solving in enumerate(solutions):
        with contextlib.suppress(PlatformError, LookupError, ValueError, RuntimeError):
            play_solution(other if number == wrong else solving, instance)


def everything_deleted(task: PlatformTask, instance: Instance) -> None:
    """Empties all tables, so that whatever had to go is gone."""
    with instance.transaction() as connection:
        for table in tables_of(task.seed.connection):
            connection.execute(f'DELETE FROM "{table.name}"')


def solved_and_deleted(task: PlatformTask, instance: Instance) -> None:
    """Does all that was asked for, then empties the first table that is watched and has rows besides."""
    play_golden(task, instance)
    table = next(one for one in tables_of(task.seed.connection) if one.name not in task.app.fixed)
    with instance.transaction() as connection:
        connection.execute(f'DELETE FROM "{table.name}"')


def _solutions(task: PlatformTask) -> list[Solution]:
    assert task.template.goals is not None, "only long tasks have sub-goals"
    return task.template.goals.solve(task.params)


def words_of(seed: SeedDatabase) -> Sequence[str]:
    """Returns the short texts in all tables of a world."""
    if seed.digest not in _words:
        tables = [table.name for table in tables_of(seed.connection)]
        values = {value for name in tables for row in seed.rows(f"SELECT * FROM {name}") for value in row.values()}
        _words[seed.digest] = sorted(one for one in values if isinstance(one, str) and 0 < len(one) <= LONGEST_WORD)
    return _words[seed.digest]
