"""`palestra eval BENCHMARK…`: by name, several models in one table, resumed, with known scores of a scripted model."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from palestra.cli import main
from palestra.runs.reader import Part, RunReader
from tests.environments.benchmarks import rows
from tests.environments.benchmarks.rows import write_rows
from tests.waiting import until


def palestra(*args: object) -> Result:
    return CliRunner().invoke(main, list(map(str, args)))


@pytest.fixture
def data(tmp_path, monkeypatch):
    """`--data` for rows of each form, in a fresh folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    files = {
        "gsm8k": write_rows(tmp_path / "test.jsonl", rows.GSM8K),
        "humaneval": write_rows(tmp_path / "HumanEval.jsonl", rows.HUMANEVAL),
        "mbpp": write_rows(tmp_path / "mbpp.jsonl", rows.MBPP),
    }
    return [f"--data={name}={file}" for name, file in files.items()]


def test_models_are_evaluated_into_one_table_and_resumed(data, ephebe_url, tmp_path):
    models = ["--model", "ephebe", "--model", "ephebe", "--server", ephebe_url]
    settings = ["--samples", 2, "max_tokens=8", "--name", "both"]
    done = palestra("eval", "gsm8k", "humaneval", *data[:2], *models, *settings)
    assert done.exit_code == 0, done.output
    table = done.stdout.splitlines()[-4:]
    assert re.split("  +", table[0]) == [
        "model",
        *(f"{name} pass@{k}" for name in ("gsm8k", "humaneval") for k in (1, 2)),
    ]
    assert table[1] == table[2]
    assert table[1].startswith("ephebe  0.0% [0.0%, 56.1%]")
    # As a kill leaves it: the second evaluation has not begun to play.
    second = tmp_path / "runs" / "both-1"
    played = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    (second / "metrics.jsonl").write_text("")
    first = (tmp_path / "runs" / "both-0" / "metrics.jsonl").read_text()
    again = palestra("eval", "--resume", "both-0", "--resume", "both-1", "--json")
    assert again.exit_code == 0, again.output
    found = json.loads(again.stdout)["evaluations"]
    assert [one["folder"] for one in found] == [str(tmp_path / "runs" / f"both-{place}") for place in (0, 1)]
    assert (tmp_path / "runs" / "both-0" / "metrics.jsonl").read_text() == first, "it was complete"
    assert found[1]["metrics"]["eval/gsm8k/pass_at_1"] == played[0]["eval/gsm8k/pass_at_1"]


def test_benchmark_is_evaluated_with_its_own_settings(data, ephebe_url, tmp_path):
    options = ["--model", "ephebe", "--server", ephebe_url, "--name"]
    done = palestra("eval", "gsm8k", data[0], *options, "one", "--json", "max_tokens=8")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["metrics"]["eval/gsm8k/tasks"] == 3
    score = {"benchmark": "gsm8k", "k": 1, "value": found["metrics"]["eval/pass_at_1"], "tasks": 3}
    (shown,) = found["scores"]
    assert score.items() <= shown.items()
    assert shown["low"] <= shown["value"] <= shown["high"]
    config = RunReader(tmp_path / "runs" / "one").read_about()["config"]
    assert (config["temperature"], config["max_tokens"], config["max_context"]) == (0, 8, 1024 + 8192)
    assert config["tasks"] > 1319
    records = RunReader(tmp_path / "runs" / "one").read_rollouts(0, Part.EVAL)
    assert {record["verdict"]["flexible_extract"] for record in records} <= {True, False}


def test_benchmarks_are_listed_with_what_they_need(data, tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_GRADERS", str(tmp_path))
    (tmp_path / "terminal-bench" / "tasks").mkdir(parents=True)
    found = {one["name"]: one for one in json.loads(palestra("eval", "list", "--json").stdout)}
    assert list(found) == ["gsm8k", "math500", "aime", "ifeval", "humaneval", "mbpp", "bfcl", "terminal-bench"]
    assert "hf download --repo-type dataset openai/gsm8k" in found["gsm8k"]["missing"][0]
    assert found["terminal-bench"]["data"] == str(tmp_path / "terminal-bench" / "tasks")
    assert found["math500"]["python"] == sys.executable
    assert len(found["ifeval"]["missing"]) == 2
    text = palestra("eval", "list").stdout
    assert "gsm8k           1,319 word problems" in text
    assert "-m pip install --no-deps bfcl-eval" in text


def test_agent_plays_task_folders_beside_other_benchmarks(data):
    from palestra.coding.shipped_tasks import SHIPPED
    from palestra.config.evaluate import load_evaluation_config
    from palestra.evaluation.run import open_environments, tasks_of
    from palestra.evaluation.score_table import scores_of
    from palestra.evaluation.targets import benchmark_defaults, default_agent, entries_named

    names = ["gsm8k", "terminal-bench"]
    given = [data[0].removeprefix("--data="), f"terminal-bench={SHIPPED}"]
    settings = [f"agent.command=[{default_agent(names)}]"]
    defaults = benchmark_defaults(names, settings)
    config = load_evaluation_config(entries_named(names, given), [], settings, defaults=defaults)
    assert config.max_tokens == 4096
    with open_environments(config) as environments:
        assert len(tasks_of(config, environments)) == 3 + 40
    metrics = {f"eval/coding/{name}": 0.5 for name in ("pass_at_1", "pass_at_1_low", "pass_at_1_high", "tasks")}
    assert [(one.benchmark, one.value) for one in scores_of(config, metrics)] == [("terminal-bench", 0.5)]


@pytest.mark.slow
def test_scripted_model_gets_the_scores_of_its_script(data, tmp_path):
    from palestra.testing.puppet import Cue, make_puppet

    script = [
        Cue("There are 3 rows of 6 eggs each: #### 18", "rows of 6 eggs"),
        Cue("I think $1,240 is earned.", "Tickets sell"),
        Cue("Four less seven makes #### -3", "falls by 7"),
        Cue("```python\ndef doubled(values):\n    return [one * 2 for one in values]\n```", "Double each value"),
        Cue("```python\ndef unshifted(word):\n    import sys\n    sys.exit(0)\n```", "Undo shifted"),
    ]
    model = make_puppet(tmp_path / "puppet", script)
    command = ["eval", "gsm8k", "humaneval", *data[:2], "--model", model, "--name", "known"]
    process = [sys.executable, "-m", "palestra.cli", *map(str, command)]
    ended = tmp_path / "runs" / "known" / "played.jsonl"
    with subprocess.Popen([*process, "concurrency=1"], stdout=subprocess.DEVNULL) as started:
        until(lambda: ended.exists() and ended.read_bytes().count(b"\n") >= 2, timeout_s=120)
        started.kill()
    before = {row["id"]: row["seconds"] for row in map(json.loads, ended.read_text().splitlines())}
    assert 2 <= len(before) < 6
    done = palestra("eval", "--resume", "known", "--json")
    assert done.exit_code == 0, done.output
    scores = {one["benchmark"]: round(one["value"], 3) for one in json.loads(done.stdout)["scores"]}
    assert scores == {"gsm8k": 0.667, "humaneval": 0.333}
    records = RunReader(tmp_path / "runs" / "known").read_rollouts(0, Part.EVAL)
    assert before.items() <= {record["id"]: record["seconds"] for record in records}.items()


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["gsm8k"], 1, "hf download --repo-type dataset openai/gsm8k"),
        (["gsm8k", "--data", "gsm9k=x"], 2, "'gsm9k' is not evaluated; did you mean gsm8k?"),
        (["gsm8k", "--data", "x"], 2, "--data NAME=PATH"),
        (["arithmetic", "--data", "arithmetic=x"], 2, "arithmetic is no benchmark"),
        (["terminal-bench"], 1, "git clone https://github.com/harbor-framework/terminal-bench-2-1 terminal-bench"),
        (["--resume", "a", "--resume", "b", "--model", "x"], 2, "--resume continues"),
    ],
)
def test_mistakes_are_told_before_anything_is_made(data, tmp_path, args, code, said):
    refused = palestra("eval", *args)
    assert (refused.exit_code, said in refused.stderr) == (code, True), refused.output
    assert not (tmp_path / "runs").exists()
