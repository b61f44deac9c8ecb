"""Training over the servers of a gym: real servers, the bundled model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from palestra.cli import main
from palestra.config.bundled import find_config_file
from palestra.config.train import EnvironmentEntry, GrpoConfig, load_train_config
from palestra.environments.bundled.arithmetic import gym_rows
from palestra.environments.gym.rows import gym_tasks
from palestra.rollouts.sources import RolloutSourceError
from palestra.runs.reader import RunReader, RunStatus
from tests.training.trainers import SMALL, finish, kill, merged, start, wait_for_steps
from tests.warm_start import ClientProcess

MATH, GAME = "math_with_judge_simple_agent", "guess_number_gymnasium_agent"
FILES = [
    "resources_servers/math_with_judge/configs/math_with_judge.yaml",
    "resources_servers/guess_number/configs/guess_number.yaml",
    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
]
OVERRIDES = [
    "++math_with_judge.resources_servers.math_with_judge.answer_from=last_number",
    "++math_with_judge.resources_servers.math_with_judge.symbolic=false",
]
GYM: dict[str, Any] = {"files": FILES, "overrides": OVERRIDES, "agent": MATH}


def write_rows(folder: Path) -> Path:
    """Sums and games, by turns."""
    system = {"role": "system", "content": "You play a game. Answer with a number only."}
    rows: list[dict[str, Any]] = []
    for place, row in enumerate(gym_rows("eval")[:4]):
        game = {"responses_create_params": {"input": [system]}, "secret": 10 + place, "guesses": 3}
        rows += [row, {**game, "agent_ref": {"name": GAME}}]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_step_over_two_agents_of_a_gym_and_an_environment_of_this_process(run_training, tmp_path: Path) -> None:
    entries = [{"name": "gym", "tasks": str(write_rows(tmp_path)), "weight": 2, "config": GYM}, {"name": "arithmetic"}]
    rollout = {"group_size": 2, "groups_per_step": 6, "max_tokens": 16, "endings": {"length": "grade"}}
    data = {"zero_variance": "keep"}
    folder = run_training("mixed", environments=entries, rollout=rollout, data=data, steps=1, alias="mixed")
    reader = RunReader(folder.path)
    (metrics,) = reader.read_metrics()
    assert (metrics["rollouts/failed"], metrics["env/gym/rollouts"], metrics["env/arithmetic/rollouts"]) == (0, 8, 4)
    assert metrics["env/gym/not_contiguous"] == 0
    assert "env/gym/library_reward" in metrics
    # The trainer's own pass over the same ids, all turns of a game in one row, finds what the sampler said.
    assert metrics["batch/sequences"] == 12
    assert metrics["mismatch/logprob_abs_max"] < 1e-3
    assert metrics["turns/mean"] > 1


def test_an_entry_whose_agent_is_overruled_by_the_rows_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_rows(tmp_path)

    def notes(agent: str | None = MATH, **more: Any) -> list[str]:
        caplog.clear()
        config = {**GYM, "agent": agent}
        entry = EnvironmentEntry(name="gym:overruled", tasks=file, eval_tasks=file, config=config, **more)
        assert len(gym_tasks(entry, "train")) == len(gym_tasks(entry, "eval")) == 8
        return [one.getMessage() for one in caplog.records if one.name.startswith("palestra")]  # not of SDKs

    response = notes()
    words = f"agent '{MATH}' plays rows that name no agent, but 4 of 8 rows name one ({GAME})"
    assert [words in note for note in response] == [True, True], "of both splits"
    assert f"extras: {{agent_ref: {{name: {MATH}}}}}" in response[0]
    assert notes() == [], "what was said is not said again"
    assert notes(extras={"agent_ref": {"name": MATH}}) == [], "it plays them all"
    assert notes(agent=GAME) == [], "nobody is overruled"


def test_the_bundled_config_and_the_rows_it_makes() -> None:
    config = load_train_config([find_config_file("gym-arithmetic")], [])
    assert isinstance(config, GrpoConfig)
    assert config.environments[0].name == "gym"
    done = CliRunner().invoke(main, ["train", "gym-arithmetic", "--dry-run"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"config": {}}, "name the gym's YAML files (files), or the head server of a running gym (head)"),
        ({"config": {"files": ["a.yaml"], "head": "http://127.0.0.1:1"}}, "either head"),
        ({"config": {"file": ["a.yaml"]}}, "config.file"),
        ({"config": GYM, "max_turns": 3}, "max_steps in its config"),
        ({"config": GYM}, "brings no tasks of its own; name a JSONL file"),
        ({"config": {**GYM, "agent": None}, "tasks": "no-agent.jsonl"}, "line 1: it names no agent"),
        ({"config": GYM, "tasks": "no-input.jsonl"}, "line 2: responses_create_params.input is missing"),
        ({"config": GYM, "tasks": "no-json.jsonl"}, "line 1: responses_create_params.metadata.extra_body"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    entry: dict[str, Any], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"responses_create_params": {"input": "2 + 2?"}}
    broken = {"responses_create_params": {"input": "2 + 2?", "metadata": {"extra_body": "{"}}}
    for name, rows in {"no-agent": [row], "no-input": [row, {}], "no-json": [broken]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(json.dumps(merged(SMALL, {"environments": [{"name": "gym", **entry}]})))
    done = CliRunner().invoke(main, ["train", "run.json", "--dry-run"])
    assert done.exit_code == (1 if "line " in error or "JSONL" in error else 2)
    assert error in done.output


def of_run(process: ClientProcess, module: str) -> list[psutil.Process]:
    """Processes below it that run this module or command."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [one for one in children if module in " ".join(one.cmdline())]


def write_config(folder: Path, **changes: Any) -> None:
    entry = {"name": "gym", "tasks": str(write_rows(folder)), "config": GYM}
    settings = {"environments": [entry], "rollout": {"max_tokens": 24}, "data": {"zero_variance": "keep"}, **changes}
    (folder / "run.json").write_text(json.dumps(merged(SMALL, settings)))


@pytest.mark.slow
def test_a_gym_whose_servers_are_killed_comes_back_and_the_run_goes_on(tmp_path: Path) -> None:
    write_config(tmp_path, steps=8)
    process = start(tmp_path, "run.json", "--name", "hurt")
    for step in (1, 3, 5):
        wait_for_steps(tmp_path, "hurt", step, process)
        (host,) = of_run(process, "palestra.gym.host")
        host.kill()
    finish(process)
    metrics = RunReader(tmp_path / "runs/hurt").read_metrics()
    assert [one["step"] for one in metrics] == list(range(1, 9))
    assert all(one["rollouts/failed"] == 0 for one in metrics)


@pytest.mark.slow
def test_a_gym_that_is_gone_ends_the_run_with_its_log(tmp_path: Path) -> None:
    write_config(tmp_path, steps=50)
    process = start(tmp_path, "run.json", "--name", "gone")
    wait_for_steps(tmp_path, "gone", 1, process)
    gym, *_ = of_run(process, "palestra.cli gym run")
    gym.kill()
    said, _ = process.communicate(timeout=110)
    assert process.returncode == 1
    assert "the gym of this run ended with code -9" in said
    assert "gym-0.log" in said
    assert RunReader(tmp_path / "runs/gone").read_summary()["status"] == RunStatus.FAILED


@pytest.mark.slow
def test_nothing_of_a_gym_is_left_when_its_trainer_is_killed(tmp_path: Path) -> None:
    write_config(tmp_path, steps=50)
    process = start(tmp_path, "run.json", "--name", "killed")
    wait_for_steps(tmp_path, "killed", 1, process)
    left = psutil.Process(process.pid).children(recursive=True)
    assert any("palestra.gym.host" in " ".join(one.cmdline()) for one in left)
    kill(process)
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive


@pytest.mark.slow
def test_a_gym_that_cannot_start_is_told_with_its_words(tmp_path: Path) -> None:
    entry = {"name": "gym", "tasks": str(write_rows(tmp_path)), "config": {**GYM, "files": [*FILES, "nowhere.yaml"]}}
    (tmp_path / "run.json").write_text(json.dumps(merged(SMALL, {"environments": [entry]})))
    process = start(tmp_path, "run.json", "--name", "wrong")
    said, _ = process.communicate(timeout=110)
    assert process.returncode == 1
    assert "the gym of this run did not start: " in said
    assert "nowhere.yaml" in said


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_model_learns_over_a_gym(tmp_path: Path) -> None:
    settings = ["steps=12", "eval.every=12", "eval.tasks=256"]
    command = [sys.executable, "-m", "palestra.cli", "train", "gym-arithmetic", "--name", "learns", *settings]
    done = subprocess.run([*command, "--display", "none"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = RunReader(tmp_path / "runs/learns").read_metrics()
    first, last = [one["eval/success"] for one in metrics if "eval/success" in one]
    assert last > 0.75
    assert last - first > 0.15


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_scaffolded_world_is_learned_with_the_config_it_comes_with(tmp_path: Path) -> None:
    def palestra(*arguments: str) -> None:
        command = [sys.executable, "-m", "palestra.cli", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    palestra("gym", "new", "tally")
    palestra("train", "resources_servers/tally/train.yaml", "--name", "learns", "--display", "none")
    metrics = RunReader(tmp_path / "runs/learns").read_metrics()
    evals = [one["eval/success"] for one in metrics if "eval/success" in one]
    assert 0.1 < evals[0] < 0.7, "there is something to begin with, and something to learn"
    assert evals[-1] > 0.75
    assert [one["rollouts/failed"] for one in metrics if "rollouts/failed" in one] == [0] * 10


@pytest.mark.slow
def test_a_gym_that_runs_already_plays_for_a_run(run_training, ephebe_url: str, tmp_path: Path) -> None:
    entry = {"name": "gym:mine", "tasks": str(write_rows(tmp_path))}
    changes = {"rollout": {"max_tokens": 24}, "data": {"zero_variance": "keep"}, "steps": 1, "alias": "mine"}
    files = [word for file in FILES for word in ("-c", file)]
    policy = ["--model-url", f"{ephebe_url}/v1", "--model-api-key", "tml-x"]

    command = [sys.executable, "-m", "palestra.cli", "gym", "run", "--with-parent", *files, "--model", "mine", *policy]
    command += ["head_server.port=0", *OVERRIDES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as gym:
        assert gym.stdout is not None
        config = {"head": gym.stdout.readline().partition("ready at ")[2].strip(), "agent": MATH}
        folder = run_training("elsewhere", environments=[{**entry, "config": config}], **changes)
    (metrics,) = RunReader(folder.path).read_metrics()
    assert metrics["env/gym_mine/rollouts"] > 0
    assert metrics["rollouts/failed"] == 0
    assert metrics["mismatch/logprob_abs_max"] < 1e-3


@pytest.mark.slow
def test_a_gym_that_does_not_answer_is_told(run_training, tmp_path: Path) -> None:
    entry = {"name": "gym", "tasks": str(write_rows(tmp_path)), "config": {"head": "http://127.0.0.1:9", "agent": MATH}}
    with pytest.raises(RolloutSourceError, match=r"no gym answers at http://127.0.0.1:9 .*palestra gym run -c FILE"):
        run_training("nobody", environments=[entry])
