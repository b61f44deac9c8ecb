"""`make demo`, as anyone would run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def run_demo(folder: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, DEMO, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def evals(folder: Path) -> list[float]:
    (file,) = folder.glob("runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["eval/success"] for row in rows if "eval/success" in row]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_agent_learns(tmp_path, seed):
    code, said = run_demo(tmp_path, "--seed", str(seed))
    assert code == 0, said
    first, *_, last = evals(tmp_path)
    assert last > 0.85
    assert last - first >= 0.4
    assert "before: reward 0" in said
    assert "after: reward 1" in said
    assert "palestra run show" in said


@pytest.mark.slow
def test_with_shuffled_rewards_it_stays_where_it_was(tmp_path):
    code, said = run_demo(tmp_path, "--shuffled")
    assert code == 1, said
    first, *_, last = evals(tmp_path)
    assert abs(last - first) < 0.15
    assert "It has not learned" in said
