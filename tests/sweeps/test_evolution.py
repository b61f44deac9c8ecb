"""Population based training: the worst runs go on from the best ones, once, whatever is killed."""

from __future__ import annotations

import pytest

from palestra.config import ConfigError
from palestra.runs.reader import RunReader, RunStatus
from palestra.runs.run_state import RunState, read_state
from palestra.runs.writer import RunFolder
from palestra.sweeps.evolution import compared_steps, decide, take_over
from palestra.sweeps.folder import SweepFolder
from palestra.sweeps.planning import load_member
from tests.sweeps.records import create, plan, play

VARY = {"optimizer.lr": [1e-4, 1e-3, 1e-2, 1e-1], "rollout.group_size": [8]}


def save(sweep: SweepFolder, member: int, step: int) -> None:
    with RunFolder.open(sweep.member_path(f"pop-{member}")) as run:
        (run.path / "checkpoints").mkdir(exist_ok=True)
        state = RunState(step=step, address=f"tinker://pop-{member}/weights/{step}")
        run.write_json(f"checkpoints/step_{step:06d}.json", state)


@pytest.fixture
def sweep(tmp_path):
    """Four runs that were evaluated at step 2, and have saved it."""
    with create(tmp_path, VARY, evolve={"every": 2}) as found:
        for n, value in enumerate((0.1, 0.4, 0.3, 0.2)):
            play(found, n, {2: value})
            save(found, n, 2)
        yield found


def test_the_worst_takes_over_the_best_one_with_settings_that_differ(sweep):
    assert compared_steps(sweep.config, sweep.plan.members[0].config) == [2, 4, 6]
    found = decide(sweep)
    assert [(one.member, one.kind) for one in found] == [
        ("pop-1", "kept"),
        ("pop-2", "kept"),
        ("pop-3", "kept"),
        ("pop-0", "evolved"),
    ]
    worst = found[-1]
    assert worst.source == "pop-1"
    assert worst.settings is not None
    assert worst.settings["optimizer.lr"] in (8e-4, 1.25e-3)
    assert worst.settings["rollout.group_size"] in (6, 10)
    assert [one.settings for one in decide(sweep)] == [one.settings for one in found]
    sweep.decide(found)
    assert decide(sweep) == []
    assert load_member(sweep.members()[0]).optimizer.lr == worst.settings["optimizer.lr"]
    assert sweep.states()[0].settings == worst.settings


def test_a_run_takes_over_once_and_again_as_long_as_the_weights_are_not_its_own(sweep):
    sweep.decide(decide(sweep))
    save(sweep, 0, 3)  # it went on meanwhile
    save(sweep, 1, 2)
    path = sweep.member_path("pop-0")
    newest = path / "checkpoints" / "step_000002.json"
    for _ in range(2):  # as if a kill had come before they were its own
        with RunFolder.open(path) as run:
            take_over(sweep, run)
        assert [file.name for file in (path / "checkpoints").iterdir()] == [newest.name]
        state = read_state(newest)
        assert (state.step, state.address, state.is_borrowed) == (2, "tinker://pop-1/weights/2", True)
    save(sweep, 0, 2)
    save(sweep, 1, 4)
    with RunFolder.open(path) as run:
        take_over(sweep, run)
    assert read_state(newest).address == "tinker://pop-0/weights/2"
    events = [row for row in RunReader(path).read_events() if row["event"] == "evolved"]
    assert {(row["run"], row["step"]) for row in events} == {("pop-1", 2)}


def test_a_run_goes_on_where_steps_are_left_also_if_the_best_one_has_ended(sweep):
    sweep.decide(decide(sweep))
    save(sweep, 1, 8)
    with RunFolder.open(sweep.member_path("pop-0")) as run:
        take_over(sweep, run)
        assert read_state(run.path / "checkpoints" / "step_000002.json").address == "tinker://pop-1/weights/2"


def test_runs_that_are_over_or_have_failed_do_not_evolve(tmp_path):
    with create(tmp_path, VARY, evolve={}) as sweep:
        play(sweep, 0, {0: 0.0, 1: 0.1}, RunStatus.STOPPED)
        play(sweep, 1, {0: 0.0}, RunStatus.FAILED)
        for n in (2, 3):
            play(sweep, n, {1: 0.5})
            save(sweep, n, 1)
        assert {one.kind for one in decide(sweep)} == {"kept"}


def test_pruning_and_evolving_exclude_each_other_and_both_need_evaluations(tmp_path):
    with pytest.raises(ValueError, match="choose one"):
        plan(tmp_path, VARY, evolve={}, prune="halving")
    with pytest.raises(ConfigError, match=r"set eval\.every"):
        plan(tmp_path, VARY, evolve={}, set={"eval.every": 0})
