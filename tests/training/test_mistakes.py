"""What goes wrong with a run: told clearly, nothing recorded lost, and the way on is named."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from palestra.cli import main
from palestra.training.run_reader import RunReader, RunStatus
from tests.training.trainers import SMALL, kill, merged, start, wait_for_steps

ENVIRONMENTS = """
import random, time
from palestra.environments import BaseTextEnv

class Base(BaseTextEnv):
    @staticmethod
    def tasks(split):
        return [{"id": str(n), "prompt": f"Say {n}."} for n in range(20)]

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


def train(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["train", *arguments])
    return result.exit_code, result.output


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
    ],
)
def test_mistakes_are_one_line_before_anything_starts(folder, arguments, message):
    code, said = train(*arguments)
    assert code == 1, said
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
    assert code == 1
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
        ("envs:NotANumber", "nan"),
    ],
)
def test_an_environment_that_never_grades_ends_the_run_and_can_be_resumed(folder, ephebe_url, environment, message):
    config = write(server=ephebe_url, environments=[{"name": environment}], rollout={"env_timeout_s": 0.5})
    code, said = train(config, "--name", "bad", "--display", "lines")
    assert code == 1, said
    assert "none of 16 rollouts could be graded" in said
    assert message in said
    assert "palestra train --resume bad" in said
    assert RunReader("runs/bad").status() is RunStatus.FAILED


def test_failed_rollouts_are_records_and_in_no_baseline(folder, ephebe_url):
    config = write(server=ephebe_url, environments=[{"name": "envs:Sometimes"}], steps=2)
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
    assert run.returncode == 1
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


def test_an_interrupted_run_says_how_to_go_on(folder, ephebe_url, tmp_path):
    run = start(tmp_path, write(server=ephebe_url, steps=50), "--name", "stopped")
    wait_for_steps(tmp_path, "stopped", 1, run)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=30)
    assert run.returncode == 130, said
    assert "palestra train --resume stopped" in said
    assert RunReader(tmp_path / "runs" / "stopped").status() is RunStatus.STOPPED


def test_two_trainers_cannot_write_one_run(folder, ephebe_url, tmp_path):
    run = start(tmp_path, write(server=ephebe_url, steps=50), "--name", "one")
    wait_for_steps(tmp_path, "one", 1, run)
    code, said = train("--resume", "one")
    kill(run)
    assert code == 1
    assert "is being written by process" in said
