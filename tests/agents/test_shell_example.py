"""`examples/shell_agent.py`, as anyone would run it, with fewer steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sandbox.needs import needs_local

EXAMPLE = Path(__file__).parents[2] / "examples" / "shell_agent.py"
SHORT = ("steps=5", "eval.every=5", "eval.tasks=48")


@needs_local
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_small_model_in_the_shell_agent_learns_from_hidden_tests(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--folder", "learned", *SHORT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr  # so few steps need not be enough
    assert "tasks it never trained on" in done.stdout
    (metrics,) = tmp_path.glob("learned/runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    before, after = (row["eval/success"] for row in rows if "eval/success" in row)
    assert before < 0.25
    assert after > before + 0.15
