"""`recipes/real/gsm8k.py` from its first line to its report, with a random model and questions of our own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environments.benchmarks import rows
from tests.environments.benchmarks.rows import write_rows

RECIPE = Path(__file__).parents[2] / "recipes" / "real" / "gsm8k.py"
SMALL = ["rollout.groups_per_step=2", "rollout.group_size=2", "rollout.max_tokens=16", "rollout.endings.length=grade"]
SMALL += ["data.zero_variance=keep", "checkpoint.every=1", "eval.every=1"]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, RECIPE, *arguments]
    options = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, start_new_session=True, **options)


@pytest.mark.slow
def test_a_killed_recipe_goes_on_and_ends_with_a_report(random_model, tmp_path):
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "train.jsonl", rows.GSM8K * 3)
    write_rows(tmp_path / "data" / "test.jsonl", rows.GSM8K)
    model = str(random_model(context=2048))
    arguments = ["--model", model, "--data", "data", "--steps", "3", *SMALL]
    with start(tmp_path, *arguments) as first:
        assert first.stdout is not None
        said = ""
        for line in first.stdout:
            said += line
            if line.startswith("step 1/3"):
                os.killpg(first.pid, signal.SIGKILL)
    assert "9 questions to train on, 3 held out" in said
    assert first.returncode == -signal.SIGKILL, said
    with start(tmp_path, *arguments) as again:
        said, _ = again.communicate(timeout=120)
    assert again.returncode == 0, said
    run = tmp_path / "runs" / "gsm8k"
    report = (run / "report.md").read_text()
    assert said.endswith(f"\n{report}\n")
    assert "GSM8K: " in report
    assert "0.0% → 0.0% in 3 steps" in report
    assert all(name in report for name in ("torch ", "tokens a second", "sampler and trainer", "peak memory"))
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {row["attempt"] for row in metrics} == {1, 2}
    with start(tmp_path, *arguments) as done:  # nothing is left to do
        assert done.communicate(timeout=60)[0].endswith(f"\n{report}\n")


def test_what_is_missing_is_named_with_how_to_get_it(random_model, tmp_path):
    with start(tmp_path, "--model", "Qwen/Qwen3-0.0B") as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "palestra model pull Qwen/Qwen3-0.0B" in said
    with start(tmp_path, "--model", str(random_model()), "--data", "nowhere") as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "nowhere is no file or folder; to get them: hf download --repo-type dataset openai/gsm8k" in said
    assert "--data DIR" in said
