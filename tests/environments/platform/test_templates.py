"""Of every template: its solution is worth 1, everything else is worth 0, and both can be said twice."""

from __future__ import annotations

import pytest

from palestra.environments.platform import APPS, Instance, PlatformTask, TaskTemplate, make_task, verify
from palestra.environments.platform.attackers import Attacker, answer_only, nothing, random_calls, stray_write
from palestra.environments.platform.changes import compared
from tests.environments.platform.conftest import FEW, NAMES, TEMPLATES, golden, opened, tasks_of

FIRST_EVAL = 2**31


counted = pytest.mark.parametrize("count", [FEW, pytest.param(200, marks=pytest.mark.slow)])
several = pytest.mark.parametrize("count", [FEW, pytest.param(5, marks=pytest.mark.slow)])


@counted
@pytest.mark.parametrize(("app", "template"), TEMPLATES, ids=NAMES)
def test_the_solution_is_worth_one_and_says_so_twice(app: str, template: TaskTemplate, count: int):
    for task in tasks_of(app, template, count):
        instance = opened(task)
        played = golden(task, instance)
        before = instance.state_hash()
        assert verify(task, instance, played.answer).score == 1.0, verify(task, instance, played.answer)
        assert verify(task, instance, played.answer) == verify(task, instance.fork(), played.answer)
        assert instance.state_hash() == before
        assert len(played.steps) <= template.max_turns


@counted
@pytest.mark.parametrize("attacker", [nothing, answer_only, random_calls])
@pytest.mark.parametrize(("app", "template"), TEMPLATES, ids=NAMES)
def test_attackers_are_worth_nothing(app: str, template: TaskTemplate, attacker: Attacker, count: int):
    lucky = 0
    for task in tasks_of(app, template, count):
        instance = opened(task)
        answer = attacker(task, instance)
        lucky += verify(task, instance, answer).score != 0.0
    assert lucky == 0


@several
@pytest.mark.parametrize(("app", "template"), TEMPLATES, ids=NAMES)
def test_the_solution_and_one_thing_more_is_worth_nothing(app: str, template: TaskTemplate, count: int):
    for task in tasks_of(app, template, count):
        instance = opened(task)
        answer = golden(task, instance).answer
        expected = instance.changes()
        stray_write(task, instance)
        assert instance.changes() != expected
        assert verify(task, instance, answer).score == 0.0


@several
@pytest.mark.parametrize(("app", "template"), TEMPLATES, ids=NAMES)
def test_a_task_comes_again_from_its_key(app: str, template: TaskTemplate, count: int):
    for task in tasks_of(app, template, count, FIRST_EVAL):
        again = make_task(str(task.key))
        assert (again.prompt, again.params, again.seed.digest) == (task.prompt, task.params, task.seed.digest)
        assert task.key.split == "eval"


@several
@pytest.mark.parametrize(("app", "template"), TEMPLATES, ids=NAMES)
def test_changes_noted_by_triggers_are_those_found_by_comparing_all_rows(app: str, template: TaskTemplate, count: int):
    for task in tasks_of(app, template, count):
        instance = opened(task)
        golden(task, instance)
        check_changes(task, instance)


@several
@pytest.mark.parametrize(
    ("app", "template"),
    [
        pytest.param(app, template, id=name, marks=() if template is APPS[app].templates[0] else pytest.mark.slow)
        for (app, template), name in zip(TEMPLATES, NAMES, strict=True)
    ],
)
def test_triggers_note_the_changes_of_any_calls(app: str, template: TaskTemplate, count: int):
    """Calls of any tools of the app, then one that certainly changes something: one template of each app is enough for
    every day."""
    for task in tasks_of(app, template, count):
        instance = opened(task)
        random_calls(task, instance)
        stray_write(task, instance)
        check_changes(task, instance)


def check_changes(task: PlatformTask, instance: Instance) -> None:
    assert instance.changes() == compared(opened(task).connection, instance.connection, task.app.volatile)
