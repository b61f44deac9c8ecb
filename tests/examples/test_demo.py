"""`make demo`, as anyone would run it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from palestra.runs.reader import RunStatus
from palestra.runs.writer import RunFolder
from tests.training.records import make_config
from tests.view.folders import make_step_group

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
    first, *later = evals(tmp_path)
    assert max(later) > 0.85
    assert max(later) - first >= 0.4
    assert "before: reward 0" in said
    assert "after: reward 1" in said
    assert re.search(r"with\s+the\s+weights\s+of\s+step\s+\d+\.\s+Training\s+took\s+[\d.]+\s+minutes", said)
    assert "palestra run show" in said


@pytest.mark.slow
def test_with_shuffled_rewards_it_stays_where_it_was(tmp_path):
    code, said = run_demo(tmp_path, "--shuffled")
    assert code == 1, said
    first, *_, last = evals(tmp_path)
    assert abs(last - first) < 0.15
    assert "It has not learned" in said


@pytest.mark.parametrize(("selected", "code"), [(7, 0), (14, 1)])
def test_the_verdict_is_about_the_weights_that_were_kept(tmp_path, selected, code):
    spec = importlib.util.spec_from_file_location("example_demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    solved = {0: 0.0, 7: 1.0, 14: 0.0}
    with RunFolder.create(tmp_path, "demo", make_config(steps=14)) as run:
        for step, success in {0: 0.34, 7: 0.89, 14: 0.43}.items():
            groups = [make_step_group("e", "4", (solved[step],))]
            run.write_eval(step, groups, {"eval/success": success, "eval/tasks": 256.0})
        run.finish(RunStatus.DONE, selected={"step": selected, "metric": "eval/success", "value": 0.0})
        console = Console(file=StringIO(), width=400)
        assert demo.tell(console, run) == code
    said = console.file.getvalue()
    assert ("after: reward 1" in said, f"with the weights of step {selected}." in said) == (code == 0, True)
    assert ("It has learned" in said, "The weights of the last step, 14, solve 43%" in said) == (code == 0, code == 0)
