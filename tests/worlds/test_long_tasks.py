"""Of every family of long tasks: its solution is worth 1 and has the length that its name says, everything else is
worth 0, and partial credit is for what was done."""

from __future__ import annotations

import asyncio

import pytest

from palestra.environments.fleet.platform_tasks import fleet_row
from palestra.environments.platform import PlatformTask, make_task, verify
from palestra.environments.platform.attackers import (
    Attacker,
    all_but_one,
    answer_only,
    everything_deleted,
    nothing,
    only_one,
    random_calls,
    solved_and_deleted,
    stray_write,
    wrong_record,
)
from palestra.environments.platform.failing_tools import is_passing
from palestra.environments.platform.golden import play_golden, play_solution
from palestra.environments.platform.verifiers import run_verifier
from tests.worlds.families import EVERY_DAY, FAMILIES, attacked, opened, tasks_of

EACH = 4  # tasks of a family in the slow tests

families = pytest.mark.parametrize(
    ("app", "name", "count"),
    [
        *[(*family, 1) for family in EVERY_DAY],
        *[pytest.param(*family, EACH, marks=pytest.mark.slow) for family in FAMILIES],
    ],
)
"""A few families every day, all of them in the slow tests."""


def solved_and_more(task: PlatformTask, instance) -> None:
    play_golden(task, instance)
    stray_write(task, instance)


@families
def test_the_solution_has_its_length_and_is_worth_one_in_any_order(app: str, name: str, count: int):
    for task in tasks_of(app, name, count):
        calls = int(name.rpartition("_")[2])
        with opened(task) as instance:
            steps = play_golden(task, instance).steps
            assert sum(not is_passing(result) for _, result in steps) == calls == task.params["calls"]
            assert len(steps) <= task.template.max_turns
            verdict = verify(task, instance)
            assert (verdict.score, verdict.progress) == (1.0, 1.0), verdict
            assert verify(task, instance) == verify(task, instance.fork()) == verdict
        assert task.template.goals is not None
        with opened(task) as instance:
            for solving in reversed(task.template.goals.solve(task.params)):
                play_solution(solving, instance)
            assert verify(task, instance).score == 1.0


ATTACKERS: dict[Attacker, float | None] = {
    nothing: 0.0,
    answer_only: 0.0,
    random_calls: None,
    all_but_one: None,
    only_one: None,
    wrong_record: None,
    solved_and_more: None,
    everything_deleted: 0.0,
    solved_and_deleted: None,
}
"""And their progress, where it is known."""


@families
def test_attackers_are_worth_nothing(app: str, name: str, count: int):
    for task in tasks_of(app, name, count):
        for attacker, progress in ATTACKERS.items():
            verdict = attacked(task, attacker)
            assert verdict.score == 0.0, (task.key, attacker)
            assert verdict.progress is not None
            assert 0.0 <= verdict.progress < 1.0, (task.key, attacker)
            assert progress is None or verdict.progress == progress, (task.key, attacker)


@families
def test_partial_credit_is_the_share_of_sub_goals(app: str, name: str, count: int):
    for task in tasks_of(app, name, count):
        assert task.template.goals is not None
        solutions = task.template.goals.solve(task.params)
        with opened(task) as instance:
            for done, solving in enumerate(solutions, 1):
                play_solution(solving, instance)
                assert verify(task, instance).progress == done / len(solutions), task.key


@families
def test_a_task_comes_again_from_its_key_to_the_last_bit(app: str, name: str, count: int):
    for task in tasks_of(app, name, count):
        again = make_task(str(task.key))
        assert (again.prompt, again.params, again.seed.digest) == (task.prompt, task.params, task.seed.digest)
        hashes = []
        for one in (task, again):
            with opened(one) as instance:
                play_golden(one, instance)
                hashes.append((instance.state_hash(), instance.events()))
        assert hashes[0] == hashes[1]


@families
def test_exported_verifiers_agree(app: str, name: str, count: int):
    for task in tasks_of(app, name, min(count, 2)):
        source = fleet_row(task)["verifier_func"]
        for attacker in (solved, all_but_one, wrong_record, solved_and_more):
            with opened(task) as instance:
                attacker(task, instance)
                done = asyncio.run(run_verifier(source, task.seed.data, instance.snapshot()))
                assert done.score == verify(task, instance).score, (task.key, attacker, done)


def solved(task: PlatformTask, instance) -> None:
    play_golden(task, instance)
