"""`palestra eval` against a real endpoint: figures, folders, resume, comparison."""

from __future__ import annotations

import json
import socket

import pytest
from click.testing import CliRunner, Result

from palestra.cli import main
from palestra.runs.reader import Part, RunReader, RunStatus


def palestra(*args: object) -> Result:
    return CliRunner().invoke(main, list(map(str, args)))


@pytest.fixture
def evaluate(ephebe_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*args: object) -> Result:
        return palestra("eval", *args, "--server", ephebe_url, "--model", "ephebe")

    return run


def test_evaluation_is_a_folder_that_others_read(evaluate, tmp_path):
    done = evaluate("arithmetic", "--tasks", 6, "--samples", 2, "--name", "one", "--json")
    assert done.exit_code == 0, done.output
    metrics = json.loads(done.stdout)["metrics"]
    assert (metrics["eval/tasks"], metrics["eval/rollouts"], metrics["eval/failed_share"]) == (6, 12, 0)
    assert metrics["eval/success"] == metrics["eval/pass_at_1"] <= metrics["eval/pass_at_2"]
    assert metrics["eval/length_mean"] == metrics["eval/sampled_tokens"] / 12 > 1
    run = RunReader(tmp_path / "runs" / "one")
    assert run.status() is RunStatus.DONE
    records = run.read_rollouts(0, Part.EVAL)
    assert len({record["task"] for record in records}) == 6
    assert all(record["messages"][-1]["role"] in ("assistant", "user") for record in records)
    assert {path.name for path in run.path.iterdir()} >= {"config.json", "eval", "metrics.jsonl", "summary.json"}
    assert not (run.path / "played.jsonl").exists()
    assert "eval/success" in palestra("run", "show", "one").output


def test_same_seed_gives_the_same_answers_and_a_paired_comparison(evaluate, tmp_path):
    for name, more in {"one": (), "again": (), "other": ("seed=1",), "greedy": ("temperature=0",)}.items():
        assert evaluate("arithmetic", "--tasks", 6, "--name", name, *more).exit_code == 0
    said = {
        name: [record["messages"] for record in RunReader(tmp_path / "runs" / name).read_rollouts(0, Part.EVAL)]
        for name in ("one", "again", "other")
    }
    assert said["one"] == said["again"] != said["other"]
    paired = json.loads(palestra("run", "compare", "one", "again", "--json").stdout)[1]["paired"]
    assert (paired["tasks"], paired["difference"], paired["p_value"]) == (6, 0, 1)
    shown = palestra("run", "compare", "one", "greedy").stdout
    assert "greedy against one on 6 tasks: " in shown


def test_interrupted_evaluation_plays_what_is_left(evaluate, tmp_path):
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{dead.getsockname()[1]}/v1"
        gone = palestra("eval", "arithmetic", "--tasks", 3, "--name", "cut", "--server", nobody, "patience_s=0.5")
    assert (gone.exit_code, "palestra eval --resume cut" in gone.stderr) == (4, True)
    run = RunReader(tmp_path / "runs" / "cut")
    assert run.status() is RunStatus.FAILED
    full = evaluate("arithmetic", "--tasks", 3, "--name", "whole")
    assert full.exit_code == 0, full.output
    # As a kill leaves it: two rollouts on disk, the second cut short.
    whole = RunReader(tmp_path / "runs" / "whole").read_rollouts(0, Part.EVAL)
    first = {key: whole[0][key] for key in ("id", "group", "index", "task", "environment", "seed", "stop")}
    line = json.dumps(first | {"reward": 0.125, "messages": whole[0]["messages"]})
    (run.path / "played.jsonl").write_text(f"{line}\n{line[: len(line) // 2]}")
    done = evaluate("--resume", "cut")
    assert done.exit_code == 0, done.output
    rewards = [record["reward"] for record in run.read_rollouts(0, Part.EVAL)]
    assert rewards == [0.125, *(record["reward"] for record in whole[1:])]


def test_checkpoint_of_a_run_is_evaluated(run_training, evaluate, ephebe_url, tmp_path):
    run = run_training("trained", steps=1)
    done = palestra("eval", "arithmetic", "--tasks", 2, "--model", f"{run.path}@last", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["metrics"]["eval/failed_share"] == 0
    assert palestra("eval", "arithmetic", "--model", f"{run.path}@7").exit_code == 3


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ([], 2, "name an environment"),
        (["nowhere"], 3, "nowhere"),
        (["arithmetic", "samples=0"], 2, "samples"),
        (["arithmetic", "--model", "no-such-model"], 2, "no-such-model"),
        (["arithmetic", "--server", "not-a-url"], 2, "server"),
        (["gym"], 2, "palestra gym collect"),
        (["--resume", "nowhere"], 3, "nowhere"),
    ],
)
def test_mistakes_are_told_before_anything_is_made(tmp_path, monkeypatch, args, code, said):
    monkeypatch.chdir(tmp_path)
    refused = palestra("eval", *args)
    assert (refused.exit_code, said in refused.stderr) == (code, True), refused.output
    assert not (tmp_path / "runs").exists()


def test_config_of_a_training_run_says_what_is_evaluated(evaluate, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        "environments: [{name: arithmetic}]\nsteps: 3\nrollout: {max_tokens: 7}\neval: {tasks: 2, samples: 3}\n"
    )
    assert evaluate(config, "--name", "configured").exit_code == 0
    saved = RunReader(tmp_path / "runs" / "configured").read_about()["config"]
    assert (saved["tasks"], saved["samples"], saved["max_tokens"]) == (2, 3, 7)
