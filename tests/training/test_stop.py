"""`palestra run stop`: the step is finished and saved, the run says so, and goes on later as if nothing had been."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner

from palestra.cli import main
from palestra.config.train import load_train_config
from palestra.runs.control import request_stop
from palestra.runs.listener import Silence
from palestra.runs.reader import RunReader, RunStatus
from palestra.runs.writer import RunFolder
from palestra.training import launch
from tests.training.trainers import FEW, SMALL, finish, merged, start, train, wait_for_steps


class Stopping(Silence):
    """Asks the run to stop while its first step is recorded."""

    def __init__(self, run) -> None:
        self.run, self.said = run, []

    def step(self, step: int, metrics: dict[str, float]) -> None:
        if step == 1:
            assert request_stop(RunReader(self.run))
            assert request_stop(RunReader(self.run))

    def note(self, text: str) -> None:
        self.said.append(text)


def test_a_run_ends_after_its_step_with_a_checkpoint_and_can_go_on(run_training, tmp_path, monkeypatch):
    whole = [row["reward/mean"] for row in run_training("whole", steps=2, rollout=FEW).read_metrics()]
    listener = Stopping(tmp_path / "runs" / "cut")
    run = run_training("cut", listener, steps=2, rollout=FEW)
    assert run.status() is RunStatus.STOPPED
    assert [row["step"] for row in run.read_metrics()] == [1]
    events = [(event["event"], event.get("step", event.get("status"))) for event in run.read_events()]
    assert events[-3:] == [("checkpoint", 1), ("stop", 1), ("end", "stopped")]
    assert any("ends after step 1" in one for one in listener.said)
    monkeypatch.chdir(tmp_path)
    code, said = train("--resume", "cut")
    assert code == 0, said
    assert [row["reward/mean"] for row in run.read_metrics()] == whole
    assert run.status() is RunStatus.DONE


def test_runs_on_files_stop_too(ephebe_url, tmp_path):
    data = tmp_path / "data.jsonl"
    chat = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
    data.write_text(f"{json.dumps(chat)}\n" * 4)
    settings = {"kind": "sft", "data": str(data), "batch_size": 2, "server": ephebe_url, "steps": 3}
    config = load_train_config([], [], settings)
    with RunFolder.create(tmp_path / "runs", "cut", config) as run:
        asyncio.run(launch.train(config, run, Stopping(run.path)))
    assert (run.status(), len(run.read_metrics())) == (RunStatus.STOPPED, 1)
    assert [event["event"] for event in run.read_events()][-3:] == ["checkpoint", "stop", "end"]


@pytest.mark.slow
def test_the_command_stops_a_run_of_another_process(ephebe_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(merged(SMALL, {"server": ephebe_url, "steps": 500})))
    process = start(tmp_path, "run.json", "--name", "long")
    wait_for_steps(tmp_path, "long", 1, process)
    done = CliRunner().invoke(main, ["run", "stop", "long", "--until-ended"])
    assert (done.exit_code, "has ended (stopped); to go on: palestra train --resume long" in done.stdout) == (0, True)
    assert "stopped after step" in finish(process)
    (tmp_path / "runs" / "long" / "checkpoints").resolve(strict=True)
