"""`palestra eval` against a real endpoint: figures, folders, resume, comparison."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from palestra.cli import main
from palestra.runs.reader import Part, RunReader, RunStatus
from tests.waiting import until

END = {"done": True, "reward": 1.0}


def palestra(*args: object) -> Result:
    return CliRunner().invoke(main, list(map(str, args)))


@pytest.fixture
def evaluate(ephebe_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*args: object) -> Result:
        return palestra("eval", *args, "--server", ephebe_url, "--model", "ephebe")

    return run


def test_evaluation_is_a_folder_that_others_read(evaluate, tmp_path):
    done = evaluate("arithmetic", "--limit", 6, "--samples", 2, "--name", "one", "--json")
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
    shown = palestra("run", "show", "one").output
    assert "eval/success" in shown
    assert "None" not in shown
    assert "add-" in (listed := palestra("rollout", "list", "one").output) or "subtract-" in listed
    assert metrics["eval/reward_stderr"] == metrics["eval/success_stderr"] >= 0


def test_tasks_of_a_run_are_played_again_by_their_names(evaluate, tmp_path):
    assert evaluate("arithmetic", "--limit", 2, "--name", "one").exit_code == 0
    first = RunReader(tmp_path / "runs" / "one").read_rollouts(0, Part.EVAL)[0]
    names = json.dumps([f"arithmetic/{first['task']}"])
    done = evaluate("runs/one/config.json", f"task_ids={names}", "--samples", 2, "--name", "again")
    assert done.exit_code == 0, done.output
    again = RunReader(tmp_path / "runs" / "again").read_rollouts(0, Part.EVAL)
    assert [(one["task"], one["messages"][0]) for one in again] == [(first["task"], first["messages"][0])] * 2
    assert all(len(one["turn_times"]) == one["turns"] for one in again)


def test_same_seed_gives_the_same_answers_and_a_paired_comparison(evaluate, tmp_path):
    for name, more in {"one": (), "again": (), "other": ("seed=1",), "greedy": ("temperature=0",)}.items():
        assert evaluate("arithmetic", "--limit", 6, "--name", name, *more).exit_code == 0
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
        gone = palestra("eval", "arithmetic", "--limit", 3, "--name", "cut", "--server", nobody, "patience_s=0.5")
    assert (gone.exit_code, "palestra eval --resume cut" in gone.stderr) == (4, True)
    run = RunReader(tmp_path / "runs" / "cut")
    assert run.status() is RunStatus.FAILED
    full = evaluate("arithmetic", "--limit", 3, "--name", "whole")
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


def test_evaluation_with_too_many_failures_has_an_exit_code_of_its_own(evaluate, tmp_path):
    rows = [{"prompt": "Begin.", "steps": [{"raise": "broken"} if bad else END]} for bad in (1, 0, 1, 1)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = {"name": "tests.training.scripted:ScriptedEnv", "eval_tasks": "tasks.jsonl"}
    (tmp_path / "eval.json").write_text(json.dumps({"kind": "eval", "environments": [entry], "max_tokens": 4}))
    failed = evaluate("eval.json", "--name", "bad")
    assert failed.exit_code == 5, failed.output
    assert "4 rollouts of 4 tasks" in failed.stdout
    assert "3 of 4 rollouts failed and do not count" in failed.stdout
    assert "75.0% of the rollouts failed, 50.0% are allowed (--max-failed)" in failed.stderr
    assert RunReader(tmp_path / "runs" / "bad").status() is RunStatus.DONE
    again = evaluate("--resume", "bad", "--max-failed", 0.75)
    assert again.exit_code == 0, again.output
    played = (tmp_path / "runs" / "bad" / "played.jsonl").read_text().splitlines()
    assert len(played) == 4 + 3  # what was graded is not played again


def test_checkpoint_of_a_run_is_evaluated(run_training, evaluate, ephebe_url, tmp_path):
    run = run_training("trained", steps=1)
    done = palestra("eval", "arithmetic", "--limit", 2, "--model", f"{run.path}@last", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["metrics"]["eval/failed_share"] == 0
    assert palestra("eval", "arithmetic", "--model", f"{run.path}@7").exit_code == 3


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ([], 2, "name an environment"),
        (["nowhere"], 3, "nowhere"),
        (["arithmetic", "samples=0"], 2, "samples"),
        (["arithmetic", 'task_ids=["nobody"]'], 1, "has a task 'nobody'"),
        (["arithmetic", "--model", "no-such-model"], 2, "no-such-model"),
        (["arithmetic", "--server", "not-a-url"], 2, "server"),
        (["gym"], 2, "name the gym's YAML files"),
        (["gym:mcqqa"], 2, "did you mean: mcqa"),
        (["gym:mcqa", "api=anthropic"], 2, "OpenAI's API"),
        (["missing.jsonl"], 1, "missing.jsonl: cannot be read"),
        (["platform:nowhere"], 1, "nowhere"),
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


def test_file_of_questions_and_answers_is_evaluated(evaluate, tmp_path):
    rows = [
        {"prompt": "What is 3 + 4?", "answer": 7, "id": "sum"},
        {"prompt": "What is 9 - 4?", "answer": ["five", "5"], "id": "difference", "match": "number"},
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = evaluate("questions.jsonl", "--samples", 4, "--name", "file", "--json")
    assert done.exit_code == 0, done.output
    metrics = json.loads(done.stdout)["metrics"]
    assert (metrics["eval/tasks"], metrics["eval/rollouts"], metrics["eval/failed_share"]) == (2, 8, 0)
    assert metrics["eval/answers/success"] == metrics["eval/pass_at_1"] <= metrics["eval/pass_at_4"]
    for row, said in {
        '{"question": "What?"}': "line 1: no 'prompt'",
        '{"prompt": "What?"}': "needs an 'answer'",
    }.items():
        (tmp_path / "questions.jsonl").write_text(row)
        refused = evaluate("questions.jsonl")
        assert (refused.exit_code, said in refused.stderr) == (1, True), refused.output


def test_gym_and_platform_are_evaluated_by_name(evaluate, tmp_path):
    done = evaluate("gym:mcqa", "platform:keys?difficulty=0a&count=50", "--limit", 2, "--name", "both", "--json")
    assert done.exit_code == 0, done.output
    metrics = json.loads(done.stdout)["metrics"]
    assert (metrics["eval/rollouts"], metrics["eval/failed_share"]) == (4, 0)
    records = RunReader(tmp_path / "runs" / "both").read_rollouts(0, Part.EVAL)
    assert {record["environment"] for record in records} == {"gym:mcqa", "fleet_task"}
    for record in records:
        assert record["metrics"]["prompt_tokens"] > record["metrics"]["sampled_tokens"] > 0
        assert record["tokens"] == record["metrics"]["sampled_tokens"]
        assert any(message["role"] == "assistant" for message in record["messages"])


def test_model_behind_anthropics_api_is_evaluated(evaluate, tmp_path):
    done = evaluate("stockroom", "--limit", 2, "--name", "messages", "--json", "api=anthropic", "temperature=0")
    assert done.exit_code == 0, done.output
    same = evaluate("stockroom", "--limit", 2, "--name", "chat", "--json", "temperature=0")
    said = [
        [record["messages"] for record in RunReader(tmp_path / "runs" / name).read_rollouts(0, Part.EVAL)]
        for name in ("messages", "chat")
    ]
    assert said[0] == said[1], "greedy, so both say the same"
    one, other = (json.loads(output.stdout)["metrics"] for output in (done, same))
    for name in ("eval/prompt_tokens", "eval/sampled_tokens", "eval/failed_share"):
        assert one[name] == other[name]


@pytest.mark.slow
def test_killed_evaluation_goes_on_and_plays_nothing_twice(evaluate, ephebe_url, tmp_path):
    command = [sys.executable, "-m", "palestra.cli", "eval", "stockroom", "--limit", "12", "--name", "killed"]
    options = ["--server", ephebe_url, "--model", "ephebe", "concurrency=1"]
    played = tmp_path / "runs" / "killed" / "played.jsonl"
    with subprocess.Popen([*command, *options], cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        until(lambda: played.exists() and played.read_bytes().count(b"\n") >= 2)
        process.kill()
    before = {row["id"]: row["seconds"] for row in map(json.loads, played.read_text().splitlines())}
    assert 2 <= len(before) < 12
    done = evaluate("--resume", "killed", "--json")
    assert done.exit_code == 0, done.output
    records = RunReader(tmp_path / "runs" / "killed").read_rollouts(0, Part.EVAL)
    assert len({record["id"] for record in records}) == len(records) == 12
    assert before.items() <= {record["id"]: record["seconds"] for record in records}.items()
    whole = evaluate("stockroom", "--limit", 12, "--name", "whole")
    assert whole.exit_code == 0
    uninterrupted = RunReader(tmp_path / "runs" / "whole").read_rollouts(0, Part.EVAL)
    assert [one["messages"] for one in uninterrupted] == [one["messages"] for one in records]
