"""A fork goes on from another run's checkpoint; a replay plays recorded steps again and says what differs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from palestra.cli import main
from palestra.config import ConfigError
from palestra.runs.control import delete_run
from palestra.runs.fork import make_fork, plan_fork
from palestra.runs.reader import RunReader
from palestra.runs.record_files import RunError
from palestra.runs.replay import parse_steps
from palestra.runs.run_state import RunState, read_state
from palestra.runs.saved_checkpoints import list_checkpoints
from palestra.runs.writer import RunFolder
from tests.training.records import make_config
from tests.training.trainers import FEW

SETTINGS = {"steps": 2, "rollout": FEW, "checkpoint": {"every": 1}}


def half(rollout) -> float:
    """A reward of one's own."""
    return 0.5 + len(rollout.turns[0].tokens) / 100


def command(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["run", *arguments])


def last_row(run: RunReader) -> list[Any]:
    row = run.read_metrics()[-1]
    return [row["step"], row["reward/mean"], row["length/mean"], pytest.approx(row["loss/sum"], abs=1e-5)]


def test_a_fork_goes_on_from_a_checkpoint_with_weights_of_its_own(run_training, tmp_path):
    parent = run_training("parent", **SETTINGS)
    runs = str(tmp_path / "runs")
    done = command("fork", "parent", "--step", "1", "--name", "child", "--runs", runs, "--display", "none")
    assert done.exit_code == 0, done.output
    child = RunReader(tmp_path / "runs" / "child")
    assert last_row(child) == last_row(parent)
    assert len(child.read_metrics()) == 1
    assert child.read_about()["facts"]["forked_from"] == {"run": "parent", "step": 1}
    assert child.read_about()["config"]["alias"] == "child"
    addresses = [{one.step: one.address for one in list_checkpoints(run)} for run in (parent, child)]
    assert addresses[0].keys() == addresses[1].keys() == {1, 2}
    assert addresses[0][1] != addresses[1][1]
    assert "parent after step 1" in command("show", "child", "--runs", runs).output


@pytest.mark.slow
def test_a_replay_differs_nowhere_unless_it_is_changed(run_training, tmp_path):
    run_training("parent", **SETTINGS)
    where = ("--steps", "2", "--runs", str(tmp_path / "runs"), "--json")
    done = command("replay", "parent", *where)
    assert done.exit_code == 0, done.output
    found = {one["what"]: one for one in json.loads(done.stdout)["comparisons"]}
    for what in ("sampled tokens", "rewards", "losses and gradients"):
        assert found[what]["first"] is None, found[what]
        assert found[what]["compared"] > 0
    reward = "reward=tests.training.test_fork:half"
    done = command("replay", "parent", *where, "--change", reward, "--name", "otherwise")
    assert done.exit_code == 0, done.output
    found = {one["what"]: one["first"] for one in json.loads(done.stdout)["comparisons"]}
    assert found["sampled tokens"] is None
    assert found["rewards"]["step"] == 2
    assert found["losses and gradients"] is not None


@pytest.fixture
def parent(tmp_path):
    """A run on disk with a checkpoint after step 3."""
    with RunFolder.create(tmp_path, "parent", make_config(steps=8), {"tokenizer": "somewhere"}) as run:
        (run.path / "engine").mkdir()
        (run.path / "checkpoints").mkdir()
        run.write_json("checkpoints/step_000003.json", RunState(step=3, position=12, address="tinker://m/weights/s"))
    return RunReader(run.path)


def test_a_fork_borrows_the_state_of_its_parent(parent):
    step, config = plan_fork(parent, None, ["optimizer.lr=1e-5"], "child")
    with make_fork(parent, step, config) as child:
        state = read_state(child.path / "checkpoints" / "step_000003.json")
        assert (state.position, state.is_borrowed, config.optimizer.lr) == (12, True, 1e-5)
        assert (child.path / "engine").resolve() == parent.path / "engine"
        assert child.read_about()["facts"]["tokenizer"] == "somewhere"
    with pytest.raises(RunError, match="keeps its own beside them"):
        delete_run(parent)
    delete_run(child)
    assert (parent.path / "engine").is_dir()
    delete_run(parent)


@pytest.mark.parametrize(
    ("step", "override", "said"),
    [(2, "seed=1", "those of the steps 3"), (3, "steps=3", "nothing left"), (3, "model.rank=7", "keeps its rank")],
)
def test_a_fork_that_cannot_be_says_why(parent, step, override, said):
    with pytest.raises((RunError, ConfigError), match=said):
        plan_fork(parent, step, [override], "child")


def test_a_fork_from_the_beginning_needs_no_checkpoint(parent):
    step, config = plan_fork(parent, 0, ["model.rank=7"], None)
    with make_fork(parent, step, config) as child:
        assert not (child.path / "checkpoints").exists()
        assert not (child.path / "engine").exists()


@pytest.mark.parametrize("text", ["0..3", "4..3", "a..b", "", "3.."])
def test_steps_are_the_first_and_the_last(text):
    with pytest.raises(RunError, match=r"30\.\.40"):
        parse_steps(text)
