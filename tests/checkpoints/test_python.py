"""Runs and their checkpoints in Python: `palestra.runs.open("first").best().export(...)`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import palestra.runs
from palestra.runs import CheckpointError, CheckpointNotFound, RunNotFound, RunStatus


def test_a_run_is_opened_by_name_or_path_and_its_best_checkpoint_exported(run, tmp_path, micro_model):
    opened = palestra.runs.open("first", tmp_path / "runs")
    assert opened.path == palestra.runs.open(run.path).path == run.path
    folder = opened.best().export(tmp_path / "out", check=True)
    assert (opened.best().name, folder) == ("first@4", tmp_path / "out")
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == micro_model.name
    assert (opened.last().export(str(tmp_path / "whole"), "merged") / "model.safetensors").is_file()
    with pytest.raises(CheckpointError, match="already exists"):
        opened.best().export(folder)


def test_checkpoints_are_chosen_by_a_metric_or_step(run):
    assert [one.step for one in run.checkpoints()] == [2, 4, 6]
    assert (run.best().step, run.last().step, run.at(2).step) == (4, 6, 2)
    assert (run.best("reward/mean").step, run.best("loss/mean").step) == (6, 2)
    with pytest.raises(CheckpointNotFound, match="no checkpoint '3'; it has last, best and the steps 2, 4, 6"):
        run.at(3)
    with pytest.raises(CheckpointNotFound, match=r"has the metric 'reward/men'; did you mean reward/mean\?"):
        run.best("reward/men")


def test_without_evaluations_the_reward_decides_and_without_metrics_the_newest(run):
    rows = [{"step": step, "attempt": 1, "reward/mean": reward} for step, reward in ((2, 0.5), (4, 0.1), (6, 0.5))]
    run.metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert run.best().step == 6
    rows[2]["reward/mean"] = 0.4
    run.metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert run.best().step == 2
    run.metrics_file.write_text("")
    assert run.best() == run.last()


def test_a_run_without_checkpoints_says_so(run):
    for file in (run.path / "checkpoints").iterdir():
        file.unlink()
    assert run.checkpoints() == []
    with pytest.raises(CheckpointNotFound, match="no checkpoint yet"):
        run.best("reward/mean")
    assert run.status() is RunStatus.KILLED
    with pytest.raises(RunNotFound, match="did you mean 'first'"):
        palestra.runs.open("frist", run.path.parent)


def test_runs_are_opened_without_torch():
    code = "import sys, palestra.runs; sys.exit(bool({'torch', 'tinker', 'httpx'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
