"""What goes wrong with a run: told clearly, nothing recorded lost, and the way on is named."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from palestra.cli import await_server
from palestra.config.train import load_train_config
from palestra.rollouts import reachability
from palestra.runs.reader import RunReader, RunStatus
from palestra.runs.writer import RunFolder
from tests.episodes.client.faults import Answer, FaultServer, Garbage, Hang
from tests.server.model_api.conftest import ephebe_in
from tests.training.trainers import FEW, SMALL, merged, start, train, wait_for_steps

ENVIRONMENTS = """
import random, time
from palestra.environments import BaseTextEnv

class Base(BaseTextEnv):
    @staticmethod
    def tasks(split):
        return [{"id": str(n), "prompt": f"Say {n}.", "number": n} for n in range(20)]

    def step(self, action):
        return {"observations": [], "reward": self.grade(action), "done": True, "metadata": {}}

class Raises(Base):
    def grade(self, action):
        raise RuntimeError("the sandbox is out of sand")

class Hangs(Base):
    def grade(self, action):
        time.sleep(600)

class NotANumber(Base):
    def grade(self, action):
        return float("nan")

class Constant(Base):
    def grade(self, action):
        return 0.0

class Slow(Base):
    async def step_async(self, action):
        import asyncio
        number = int(self.extras["number"])
        await asyncio.sleep(0.0 if number % 4 else 1.0)
        return {"observations": [], "reward": float(len(action) % 2), "done": True, "metadata": {}}

class Sometimes(Base):
    def grade(self, action):
        if len(action) % 2:
            raise RuntimeError("an odd answer")
        return float(len(action) % 4 == 0)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(**settings) -> str:
    Path("run.json").write_text(json.dumps(merged(SMALL, settings)))
    return "run.json"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stockroom", "optimiser.lr=1"], "unknown key 'optimiser'"),
        (["stockroom", "rollout.group_size=1"], "a group of one has no baseline"),
        (["stockroom", "optimizer.lr=fast"], "optimizer.lr"),
        (["stokroom"], "did you mean stockroom?"),
        (["nowhere.yaml"], "nowhere.yaml"),
        (["stockroom", "kind=gpro"], "did you mean grpo?"),
        (["stockroom", "environments=[{name: stokroom}]"], "stockroom"),
        (["stockroom", "model.name=no/where"], "no/where"),
        (["stockroom", "model.name=./nowhere"], "nowhere"),
        ([], "give one CONFIG"),
        (["--resume", "nothing"], "no run 'nothing'"),
        (["--resume", "nothing", "--name", "other"], "--name is for a new one"),
        (["stockroom", "rollout.top_p=0"], "rollout.top_p"),
        (["stockroom", "eval.every=0", "early_stop={at_least: 0.9}"], "early_stop needs evaluations"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(folder, arguments, message):
    code, said = train(*arguments)
    assert code == (3 if "no run" in message else 2), said
    assert message in said
    assert "Traceback" not in said
    assert not Path("runs").exists()


def test_a_task_without_a_prompt_is_named_by_its_line(folder):
    Path("tasks.jsonl").write_text('{"prompt": "Say 1."}\n{"question": "What?"}\n')
    code, said = train(write(environments=[{"name": "envs:Raises", "tasks": "tasks.jsonl"}]))
    assert code == 1
    assert "tasks.jsonl" in said
    assert "2" in said
    assert "prompt" in said


def test_a_model_too_big_for_memory_is_refused(folder):
    big = Path("big")
    big.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (big / name).write_bytes((Path(main_folder()) / "bundled" / "ephebe" / name).read_bytes())
    with (big / "model.safetensors").open("wb") as file:
        file.truncate(1 << 42)  # four terabytes of holes
    code, said = train("stockroom", "model.name=./big", "--dry-run")
    assert code == 2
    assert "GiB of memory are free" in said


def main_folder() -> Path:
    import palestra

    return Path(palestra.__file__).parent


def test_a_dry_run_shows_the_config_and_leaves_nothing(folder):
    code, said = train("stockroom", "steps=3", "--dry-run")
    assert code == 0
    assert json.loads(said)["steps"] == 3
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("envs:Raises", "the sandbox is out of sand"),
        ("envs:Hangs", "env_failed"),
        pytest.param("envs:NotANumber", "nan", marks=pytest.mark.slow),
    ],
)
def test_an_environment_that_never_grades_ends_the_run_and_can_be_resumed(folder, ephebe_url, environment, message):
    config = write(server=ephebe_url, environments=[{"name": environment}], rollout={"env_timeout_s": 0.5})
    code, said = train(config, "--name", "bad", "--display", "lines")
    assert code == 1, said
    assert "none of 16 rollouts could be graded" in said
    assert message in said
    assert "palestra train --resume bad" in said
    run = RunReader("runs/bad")
    assert run.status() is RunStatus.FAILED
    records = run.read_rollouts(1)
    assert len(records) == 16
    assert all(record["stop"] == "env_failed" and record["error"] for record in records)


def test_failed_rollouts_are_records_and_in_no_baseline(folder, ephebe_url):
    config = write(server=ephebe_url, environments=[{"name": "envs:Sometimes"}], steps=1)
    code, said = train(config, "--name", "some", "--display", "none")
    assert code == 0, said
    run = RunReader("runs/some")
    records = run.read_rollouts(1)
    failed = [record for record in records if record["stop"] == "env_failed"]
    assert failed
    assert all(record["reward"] is None and "an odd answer" in record["error"] for record in failed)
    row = run.read_metrics()[0]
    graded = [record["reward"] for record in records if record["reward"] is not None]
    assert row["reward/mean"] == pytest.approx(sum(graded) / len(graded))
    assert row["rollouts/failed"] == len(failed)


@pytest.mark.slow
def test_a_server_that_went_away_ends_the_run_and_it_can_be_resumed(folder, tmp_path):
    command = [sys.executable, "-m", "palestra.cli", "serve", "--state", "state"]
    server = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert server.stdout is not None
    url = server.stdout.readline().partition("ready at ")[2].split()[0]
    run = start(tmp_path, write(server=url, server_patience_s=2, steps=50), "--name", "gone")
    wait_for_steps(tmp_path, "gone", 3, run)
    server.send_signal(signal.SIGKILL)
    server.wait()
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 4
    assert "has not answered for 2 s" in said
    assert "palestra train --resume gone" in said
    again = subprocess.Popen(
        [*command, "--port", url.rpartition(":")[2]], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    with again:
        assert again.stdout is not None
        assert "ready" in again.stdout.readline()
        resumed = start(tmp_path, "--resume", "gone", "steps=4")
        said, _ = resumed.communicate(timeout=60)
        assert resumed.returncode == 0, said
        again.terminate()


def test_two_trainers_cannot_write_one_run(folder):
    config = load_train_config([write()], [], {})
    with RunFolder.create(config.runs, "one", config):
        code, said = train("--resume", "one")
    assert code == 1
    assert "is being written by process" in said


def test_a_wrong_server_is_told_soon_and_leaves_nothing(folder, monkeypatch, caplog):
    assert reachability.REACH_S < 5
    monkeypatch.setattr(reachability, "REACH_S", 0.3)
    code, said = train("arithmetic", "--name", "none", "--server", "http://127.0.0.1:1")
    assert code == 4
    assert said.startswith("reading arithmetic\n")
    assert ["refused; trying again" in line for line in caplog.messages] == [True]  # after the first refusal
    assert "error: http://127.0.0.1:1 does not answer" in said
    assert "is this its address (--server)?" in said
    assert "--resume" not in said
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(404, b"<html>not here</html>"), "answers, but it is not a server of the Tinker API"),
        (Answer(200, b"<html>welcome</html>"), "answers, but it is not a server of the Tinker API"),
        (Garbage(), "does not answer"),
        (Hang(), "does not answer: timed out"),
    ],
    ids=["404", "html", "garbage", "silence"],
)
def test_a_server_of_something_else_is_no_server(folder, monkeypatch, answer, message):
    monkeypatch.setattr(reachability, "REACH_S", 0.3)
    monkeypatch.setattr(await_server, "ANSWER_S", 0.3)
    monkeypatch.setattr(await_server, "SILENT_S", 0.5)
    with FaultServer(answer) as server:
        code, said = train("arithmetic", "--name", "none", "--server", server.url)
    assert code == (4 if "does not answer" in message else 1)
    assert message in said
    assert "--resume" not in said
    assert not Path("runs").exists()


def test_what_is_no_address_is_told_with_what_one_looks_like(folder):
    code, said = train("arithmetic", "--server", "localhost:8000")
    assert code == 2
    assert "'localhost:8000' is not the URL of a server; it looks like http://127.0.0.1:8000" in said
    assert not Path("runs").exists()


def test_lines_tell_from_the_beginning_what_a_run_is_at(folder, ephebe_url):
    config = write(server=ephebe_url, eval={"every": 1, "tasks": 2}, early_stop={"at_least": 0}, steps=1)
    code, said = train(config, "--name", "told")
    assert code == 0, said
    response = [line.split("  ")[0] for line in said.splitlines()]
    places = [
        response.index(line)
        for line in ("reading run.json", f"looking for {ephebe_url}", "eval: 0 of 2", "eval after step 0")
    ]
    assert places == sorted(places)
    assert places[0] == 0


def test_a_metric_that_no_evaluation_has_is_named(folder, ephebe_url):
    config = write(
        server=ephebe_url, eval={"every": 1, "tasks": 2}, early_stop={"metric": "eval/sucess", "at_least": 1}
    )
    code, said = train(config, "--name", "typo", "--display", "none")
    assert code == 1
    assert "did you mean eval/success?" in said


@pytest.mark.parametrize(
    ("asynchronous", "zero_variance"),
    [
        (True, "drop"),
        pytest.param(False, "refill", marks=pytest.mark.slow),
        pytest.param(True, "refill", marks=pytest.mark.slow),
        pytest.param(False, "drop", marks=pytest.mark.slow),
    ],
)
def test_a_run_where_nothing_can_be_learned_goes_on(folder, ephebe_url, asynchronous, zero_variance):
    config = write(
        server=ephebe_url,
        environments=[{"name": "envs:Constant"}],
        asynchronous={"enabled": asynchronous},
        data={"zero_variance": zero_variance, "max_refills": 1},
        steps=2,
    )
    code, said = train(config, "--name", "flat", "--display", "lines")
    assert code == 0, said
    assert "Step 1 has nothing to train on: " in said
    assert "warning after step 2" not in said  # the advice is given once
    assert "\nwarning: Step 2 has nothing to train on: " in said  # in short, since it holds at the end
    rows = RunReader("runs/flat").read_metrics()
    least = 16 * (2 if zero_variance == "refill" else 1)
    assert all(row["rollouts/total"] >= least and row["batch/sequences"] == 0 for row in rows)


@pytest.mark.slow
def test_slow_tasks_are_trained_on_as_often_as_fast_ones_in_async_mode(folder, ephebe_url):
    settings = {"environments": [{"name": "envs:Slow"}], "asynchronous": {"enabled": True}, "steps": 5}
    code, said = train(write(server=ephebe_url, data={"zero_variance": "keep"}, **settings), "--name", "slow")
    assert code == 0, said
    run = RunReader("runs/slow")
    records = [record for step in run.steps() for record in run.read_rollouts(step)]
    assert len(records) == 5 * 16
    assert not any(record["stop"] == "stale" for record in records)
    assert max(row["staleness/max"] for row in run.read_metrics()) <= 1
    assert len({record["task"] for record in records}) == 20  # each task once in 20 groups


def test_a_resume_that_fails_leaves_the_saved_config(folder, ephebe_url, monkeypatch):
    monkeypatch.setattr(reachability, "REACH_S", 0.3)
    config = write(server=ephebe_url, environments=[{"name": "arithmetic"}], steps=1, rollout=FEW)
    assert train(config, "--name", "kept", "--display", "none")[0] == 0
    code, said = train("--resume", "kept", "server=http://127.0.0.1:1", "steps=2")
    assert code == 4, said
    assert "http://127.0.0.1:1 does not answer" in said
    code, said = train("--resume", "kept", "model.rank=4", "steps=2")
    assert "has rank 16" in said
    code, said = train("--resume", "kept", "steps=2", "--display", "none")
    assert code == 0, said
    events = [event for event in RunReader("runs/kept").read_events() if event["event"] == "config"]
    assert [event["changes"] for event in events] == [{"steps": [1, 2]}]


@pytest.mark.slow
def test_sigterm_ends_a_run_as_ctrl_c_does(folder, ephebe_url, tmp_path):
    run = start(tmp_path, write(server=ephebe_url, steps=50), "--name", "told")
    wait_for_steps(tmp_path, "told", 1, run)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=90)
    assert run.returncode == 130, said
    assert RunReader(tmp_path / "runs" / "told").status() is RunStatus.STOPPED
    assert re.search(r"stopped; (nothing was saved yet|everything up to step \d+ is saved); to go on: ", said)


@pytest.mark.slow
def test_a_run_that_is_told_to_end_while_the_server_is_busy_says_where_it_goes_on(folder, tmp_path):
    with ephebe_in(tmp_path / "server") as server:
        server.start()
        run = start(tmp_path, write(server=server.url, steps=50, checkpoint={"every": 1}), "--name", "busy")
        wait_for_steps(tmp_path, "busy", 3, run)
        os.kill(server.worker_pid, signal.SIGSTOP)
        run.send_signal(signal.SIGTERM)
        said, _ = run.communicate(timeout=90)
        os.kill(server.worker_pid, signal.SIGCONT)
        assert run.returncode == 130, said
        assert "did not save the final weights within 5 s; checkpoints are kept" in said
        assert "TimeoutError" not in said
        found = re.search(
            r"stopped; everything up to step (\d+) is saved; to go on: palestra train --resume busy", said
        )
        assert found is not None, said
        step = int(found[1])
        assert step >= 2
        code, said = train("--resume", "busy", f"steps={step + 1}")
    assert (code, f"continuing after step {step}" in said) == (0, True), said
