"""kill -9 in the middle of a run, and the same curve afterwards."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from palestra.environments.task_order import TaskOrder
from palestra.runs.reader import RunReader, RunStatus
from palestra.training.collecting.sync_collector import RequestMaker
from palestra.types.rollouts import Task
from tests.training.trainers import FEW, SMALL, TOOLS, finish, kill, merged, start, train, wait_for_steps


def write_config(folder: Path, **settings: Any) -> str:
    (folder / "run.json").write_text(json.dumps(merged(SMALL, settings)))
    return "run.json"


def curve(folder: Path, name: str) -> list[tuple[float, float]]:
    rows = RunReader(folder / "runs" / name).read_metrics()
    return [(row["reward/mean"], round(row["loss/sum"], 5)) for row in rows]


def test_a_killed_run_resumes_on_the_undisturbed_curve(ephebe_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path, server=ephebe_url, steps=4, rollout=FEW)
    code, said = train(config, "--name", "whole")
    assert code == 0, said
    process = start(tmp_path, config, "--name", "cut")
    wait_for_steps(tmp_path, "cut", 3, process)  # one step past its checkpoint
    kill(process)
    cut = RunReader(tmp_path / "runs" / "cut")
    assert cut.status() is RunStatus.KILLED
    code, said = train("--resume", "cut")
    assert (code, "continuing after step 2" in said) == (0, True), said
    assert curve(tmp_path, "cut") == curve(tmp_path, "whole")
    assert cut.status() is RunStatus.DONE
    assert len(cut.read_metrics()) == 4


@pytest.mark.slow
def test_a_finished_run_can_be_made_longer(ephebe_url, tmp_path):
    config = write_config(tmp_path, server=ephebe_url)
    finish(start(tmp_path, config, "--name", "whole"))
    finish(start(tmp_path, config, "--name", "short", "steps=3"))
    finish(start(tmp_path, "--resume", "short", "steps=5"))
    assert curve(tmp_path, "short") == curve(tmp_path, "whole")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_run_with_its_own_server_survives_kills_at_any_moment(tmp_path, seed):
    """Trainer and server go together, again and again; the curve is that of a run nobody disturbed."""
    rng = random.Random(seed)
    config = write_config(tmp_path, steps=6, seed=seed, **TOOLS)
    finish(start(tmp_path, config, "--name", "whole"))
    process = start(tmp_path, config, "--name", "cut")
    for _ in range(3):
        wait_for_steps(tmp_path, "cut", 1, process)
        time.sleep(rng.uniform(0, 6))
        kill(process)
        assert not servers_of(tmp_path / "runs" / "cut")
        process = start(tmp_path, "--resume", "cut")
    finish(process)
    assert curve(tmp_path, "cut") == curve(tmp_path, "whole")


def servers_of(run: Path) -> list[psutil.Process]:
    """Those that are still there a while after their trainer is gone."""
    deadline = time.monotonic() + 20
    while living := [p for p in psutil.process_iter(["cmdline"]) if str(run) in " ".join(p.info["cmdline"] or [])]:
        if time.monotonic() > deadline:
            return living
        time.sleep(0.1)
    return []


@pytest.mark.slow
def test_an_evaluation_that_was_killed_is_done_at_the_resume(ephebe_url, tmp_path):
    """The checkpoint is there, the evaluation after it is not: as if the kill had come in between."""
    settings = {"environments": [{"name": "arithmetic"}], "eval": {"every": 1, "tasks": 4}, "steps": 2}
    rule = {"patience": 9}
    config = write_config(tmp_path, server=ephebe_url, checkpoint={"every": 1}, early_stop=rule, **settings)
    finish(start(tmp_path, config, "--name", "cut"))
    pointer = tmp_path / "runs" / "cut" / "checkpoints" / "step_000002.json"
    state = json.loads(pointer.read_text())
    assert state["evaluated"] == 2
    pointer.write_text(json.dumps(state | {"evaluated": 1, "evaluations_since_best": 0}))
    assert "eval after step 2" in finish(start(tmp_path, "--resume", "cut"))
    assert json.loads(pointer.read_text())["evaluated"] == 2
    assert "eval after step" not in finish(start(tmp_path, "--resume", "cut"))


def test_positions_begun_and_not_used_are_played_first_after_a_resume():
    tasks = [Task(id=str(number), environment="x", prompt=[]) for number in range(20)]
    maker = RequestMaker(TaskOrder([(1.0, tasks)], 0), 0, 2, position=7, pending=[3, 5])
    assert [maker.next(1).position for _ in range(4)] == [3, 5, 7, 8]
    assert maker.position == 9
