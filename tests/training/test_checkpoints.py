"""Checkpoints of a run at a server: listed, downloaded, exported, deleted."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

import palestra.runs
from palestra.cli import main
from palestra.runs import RunStatus
from palestra.runs.listener import Silence
from tests.training.trainers import FEW


def call(*args: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, args)])


@pytest.mark.parametrize("form", ["peft", pytest.param("merged", marks=pytest.mark.slow)])
def test_checkpoint_of_a_server_is_exported_and_deleted(run_training, ephebe_url, tmp_path, form):
    run = run_training("saved", steps=1, rollout=FEW)
    at = ("--server", ephebe_url, "--json")
    (saved,) = json.loads(call("list", run.path, "--json").stdout)
    assert (saved["step"], saved["server"], saved["folder"]) == (1, ephebe_url, None)
    check = ["--check"] if form == "merged" else []  # transformers, which takes seconds to import
    done = call("export", run.path, tmp_path / "out", "--as", form, *check, "--json")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert not check or made["check"]["mean_difference"] < made["check"]["change"] / 5
    assert (tmp_path / "out" / ("config.json" if form == "merged" else "adapter_config.json")).is_file()
    paths = {one["tinker_path"] for one in json.loads(call("list", *at).stdout)}
    assert saved["address"] in paths
    assert not [path for path in paths if "external_weights/export-" in path]  # made for the download alone
    assert call("delete", saved["address"], "--server", ephebe_url).exit_code == 0
    assert call("export", run.path, tmp_path / "gone").exit_code == 3
    assert call("list", "--server", "http://127.0.0.1:1").exit_code == 4


class Exporting(Silence):
    """Exports a checkpoint while the run goes on."""

    def __init__(self, run, out) -> None:
        self._run, self._out = run, out
        self.status: RunStatus | None = None

    def step(self, step: int, metrics: dict[str, float]) -> None:
        if step == 1:
            run = palestra.runs.open(self._run)
            self.status = run.status()
            run.last().export(self._out)


@pytest.mark.slow
def test_a_checkpoint_is_exported_while_its_run_goes_on(run_training, tmp_path):
    listener = Exporting(tmp_path / "runs" / "going", tmp_path / "out")
    run = run_training("going", listener, steps=2, checkpoint={"every": 1}, rollout=FEW)
    assert (listener.status, run.status()) == (RunStatus.RUNNING, RunStatus.DONE)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "ephebe"
    assert palestra.runs.open(run.path).at(1).step == 1
