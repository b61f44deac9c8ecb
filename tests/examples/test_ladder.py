"""`examples/ladder.py`, as anyone would run it, with the fewest steps there can be; and once in full."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

LADDER = Path(__file__).parents[2] / "examples" / "ladder.py"
TINY = ("imitation.data=['platform:keys?difficulty=0a,0d&count=16']", "imitation.steps=2", "imitation.batch_size=4")
TINY += ("steps=1", "eval.tasks=4", "rollout.group_size=2", "rollout.groups_per_step=2", "rollout.max_tokens=8")
LEVELS = ["0a", "0b", "0c", "0d"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(LADDER), "--folder", "climbed", *arguments]


def run_ladder(folder: Path, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(command(*arguments), cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def metrics(folder: Path, run: str) -> list[dict[str, Any]]:
    file = folder / "climbed" / run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
def test_each_phase_runs_once_and_the_curve_is_told(tmp_path):
    code, said, wrong = run_ladder(tmp_path, *TINY)
    assert code == 1, wrong  # nobody climbs in one step
    assert said.startswith("loading Palestra\nuntrained: up to 1 steps\nloading ephebe\n")
    assert all(line in said for line in ("starting the server of ephebe", "eval: 0 of 4\n"))
    assert "It has not got there" in said
    assert all(word in said for word in (*LEVELS, "untrained", "imitation", "GRPO 1", "1 tasks of each level"))
    assert len((tmp_path / "climbed" / "keys" / "imitation" / "data.jsonl").read_text().splitlines()) == 16
    written = {run: metrics(tmp_path, run) for run in ("untrained", "keys/imitation", "keys")}
    assert [row["step"] for row in written["untrained"]] == [0]
    assert [row["step"] for row in written["keys/imitation"]] == [1, 2]
    assert [row["step"] for row in written["keys"]] == [0, 1, 1]

    code, said, wrong = run_ladder(tmp_path, *TINY, "--json")
    assert code == 1, wrong
    found = json.loads(said)
    assert [one["when"] for one in found["curve"]] == ["untrained", "imitation", "GRPO 1"]
    assert all(list(one["levels"]) == LEVELS for one in found["curve"])
    assert {run: metrics(tmp_path, run) for run in written} == written  # all of it was there already


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_with_the_same_command(tmp_path):
    longer = [*TINY, "imitation.steps=40", "checkpoint.every=1", "--json"]
    process = subprocess.Popen(command(*longer), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while len(metrics(tmp_path, "keys/imitation")) < 2:
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    code, said, wrong = run_ladder(tmp_path, *longer)
    assert code == 1, wrong
    assert len(json.loads(said)["curve"]) == 3
    first, *_, last = (row["step"] for row in metrics(tmp_path, "keys/imitation") if row["attempt"] == 2)
    assert (first > 1, last) == (True, 40)
    assert {row["attempt"] for row in metrics(tmp_path, "untrained")} == {1}


@pytest.mark.slow
def test_a_setting_that_does_not_exist_is_named_before_anything_is_made(tmp_path):
    code, said, wrong = run_ladder(tmp_path, "rollout.groupsize=2")
    assert code == 1
    assert "did you mean rollout.group_size" in " ".join((said + wrong).split())
    assert not (tmp_path / "climbed").exists()


@pytest.mark.slow
def test_it_climbs(tmp_path):
    code, said, wrong = run_ladder(tmp_path, "--json")
    untrained, warmed, *_, last = (one["levels"] for one in json.loads(said)["curve"])
    assert code == 0, wrong
    assert max(untrained.values()) < 0.1
    assert min(last[level] for level in ("0a", "0b", "0c")) > 0.9
    assert last["0d"] > warmed["0d"]
