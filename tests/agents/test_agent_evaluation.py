"""`palestra eval --agent`: coding tasks in sandboxes, played by the shell agent."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from palestra.cli import main
from palestra.evaluation.comparison import compare_evaluations
from palestra.runs.reader import Part, RunReader
from tests.agents.coding_run import DAWDLES, REFUSES, SHIRKS, SOLVES, write_tasks
from tests.agents.conftest import PuppetServer
from tests.server.conftest import KEY
from tests.waiting import until


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks")


def palestra(folder: Path, *words: str) -> Result:
    """The command in this process, in a folder."""
    with chdir(folder):
        return CliRunner().invoke(main, words)


def at(server: PuppetServer) -> list[str]:
    return ["--model", "puppet", "--server", server.url, "--key", KEY]


def rollouts(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for record in RunReader(folder).read_rollouts(0, Part.EVAL):
        found.setdefault(record["task"], []).append(record)
    return found


def test_an_agent_is_evaluated_on_a_folder_of_tasks_and_compared_with_itself(
    coding_server: PuppetServer, tasks: Path, tmp_path: Path
) -> None:
    short = ["agent.timeout_s=4", "agent.on_timeout=0.0", "--samples", "2", "--json"]
    done = palestra(tmp_path, "eval", str(tasks), "--agent", "shell", *at(coding_server), "--name", "one", *short)
    assert done.exit_code == 0, done.stderr
    metrics = json.loads(done.stdout)["metrics"]
    assert (metrics["eval/tasks"], metrics["eval/rollouts"], metrics["eval/success"]) == (4, 8, 0.25)
    assert metrics["eval/pass_at_2"] == 0.25
    assert metrics["eval/sampled_tokens"] > 40
    played = rollouts(tmp_path / "runs" / "one")
    listed = json.loads(palestra(tmp_path, "rollout", "list", "one", "--limit", "0", "--json").stdout)
    assert sum(one["tokens"] for one in listed) == metrics["eval/sampled_tokens"]
    assert {task: [one["reward"] for one in found] for task, found in played.items()} == {
        SOLVES: [1.0, 1.0],
        SHIRKS: [0.0, 0.0],
        REFUSES: [0.0, 0.0],
        DAWDLES: [0.0, 0.0],
    }
    (first, _) = played[SOLVES]
    assert first["metrics"]["ending/done"] == 1.0
    assert first["verdict"]["patch"].startswith("diff --git")
    assert len(first["turn_times"]) == first["turns"]
    assert first["turn_times"][0][1] > 0, "the time of its commands"
    assert "The file is there." in json.dumps(first["messages"])
    kept = [json.loads(file.read_text()) for file in (tmp_path / "runs" / "one" / "agent").glob("*/result.json")]
    assert sorted(one["task"] for one in kept) == sorted(2 * [SOLVES, SHIRKS, REFUSES, DAWDLES])

    words = ["eval", "terminal-bench", f"--data=terminal-bench={tasks}", *at(coding_server), "--name", "other"]
    other = palestra(
        tmp_path, *words, "--limit", "2", "agent.timeout_s=4", "agent.on_timeout=0.0", "agent.on_refusal=-1"
    )
    assert other.exit_code == 0, other.stderr
    assert "terminal-bench pass@1" in other.stdout
    compared = compare_evaluations(*(RunReader(tmp_path / "runs" / name) for name in ("one", "other")))
    assert compared is not None
    assert (compared.tasks, compared.worse, compared.better) == (2, 1, 0)


@pytest.mark.slow
def test_a_killed_evaluation_of_an_agent_plays_only_what_is_left(
    coding_server: PuppetServer, tasks: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "palestra.cli", "eval", str(tasks), "--agent", "shell", *at(coding_server)]
    process = subprocess.Popen([*command, "--name", "killed"], cwd=tmp_path, start_new_session=True)
    ended = tmp_path / "runs" / "killed" / "played.jsonl"
    try:
        until(lambda: ended.exists() and len(ended.read_text().splitlines()) == 3)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = {json.loads(line)["id"] for line in ended.read_text().splitlines()}
    done = palestra(tmp_path, "eval", "--resume", "killed", "agent.timeout_s=4", "--key", KEY, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["eval/rollouts"] == 4
    results = list((tmp_path / "runs" / "killed" / "agent").glob("*/result.json"))
    assert len(before) == 3
    assert len(results) == 4


def test_what_cannot_be_played_is_refused_before_anything_is_started(tasks: Path, tmp_path: Path) -> None:
    without = palestra(tmp_path, "eval", str(tasks), "--model", "puppet", "--server", "http://127.0.0.1:9")
    assert without.exit_code == 2
    assert "--agent shell" in without.stderr
    assert not (tmp_path / "runs").exists()
