"""Of every family of long tasks: its solution is worth 1 and has the length that its name says, everything else is
worth 0, and partial credit is for what was done."""

from __future__ import annotations

import asyncio
import json

import pytest

from palestra.environments.fleet import FleetTaskEnv
from palestra.environments.fleet.platform_tasks import fleet_row, gold_messages
from palestra.environments.platform import PlatformTask, TaskKey, make_task, verify
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
from palestra.environments.platform.skilled_player import measure_templates
from palestra.environments.platform.task_records import FIRST_EVAL
from palestra.environments.platform.verifiers import run_verifier
from tests.worlds.families import EVERY_DAY, FAMILIES, attacked, opened, task_of, tasks_of

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


@pytest.mark.parametrize(
    ("app", "count"), [("keys", 10), *(pytest.param(app, 1000, marks=pytest.mark.slow) for app in ("keys", "forum"))]
)
def test_no_two_tasks_are_alike_and_held_out_ones_are_in_worlds_of_their_own(app: str, count: int):
    train, held_out = ([task_of(app, "errands_10", first + n) for n in range(count)] for first in (0, FIRST_EVAL))
    asked = {(task.seed.digest, str(task.params["goals"])) for task in (*train, *held_out)}
    assert len(asked) == 2 * count
    assert not {task.seed.digest for task in train} & {task.seed.digest for task in held_out}


def test_a_mistake_that_is_undone_is_no_mistake():
    task = make_task("mail-errands_10-4-0")
    with opened(task) as instance:
        message = json.loads(instance.call("search_messages", {"folder": "Inbox"}).text)["messages"][-1]["id"]
        assert not instance.call("move_message", {"id": message, "folder": "Travel"}).is_error
        assert verify(task, instance).failed[-1].startswith("unasked: ")
        instance.call("move_message", {"id": message, "folder": "Inbox"})
        play_golden(task, instance)
        assert verify(task, instance).score == 1.0


@pytest.mark.parametrize("is_solved", [True, False])
def test_rewards_of_turns_add_up_to_the_reward_of_the_whole(is_solved: bool):
    key = "mail-outages_10-4-3"
    messages = gold_messages(key) if is_solved else [*gold_messages(key)[:-2], "<done>"]

    def played(**settings: bool) -> tuple[list[float], list[float | None]]:
        env = FleetTaskEnv({"tasks_file": "platform:mail", **settings}, extras={"task_key": key})
        env.init([])
        steps = [env.step(message) for message in messages]
        env.close()
        return [step["reward"] or 0.0 for step in steps], [step["metadata"].get("progress") for step in steps]

    goals = len(make_task(key).params["goals"])
    plain, seen = played()
    assert plain == [*[0.0] * (len(messages) - 1), float(is_solved)]
    assert set(seen) == {None}
    partial, seen = played(partial_reward=True)
    assert sum(partial) == pytest.approx(1.0 if is_solved else (goals - 1) / goals)
    assert [one for one in seen if one is not None] == sorted(one for one in seen if one is not None)
    for is_partial, whole in ((True, partial), (False, plain)):
        by_turn, _ = played(partial_reward=is_partial, turn_rewards=True)
        assert sum(by_turn) == pytest.approx(sum(whole))
        assert sum(reward > 0 for reward in by_turn) == (goals if is_solved else goals - 1)


def test_a_better_player_solves_more():
    (row,) = measure_templates([TaskKey("keys", "errands_10", "4", number) for number in range(4)], [0.5, 0.95, 1.0])
    assert (row["calls"], row["tasks"]) == (10, 4)
    low, high, perfect = (of["success"] for of in row["skills"])
    assert low < high < perfect == 1.0


def solved(task: PlatformTask, instance) -> None:
    play_golden(task, instance)
