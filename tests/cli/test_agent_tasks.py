"""palestra agent tasks, verify and convert: what is listed, what a solution is worth, and what is wrong in a line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.tree import palestra
from tests.coding import folders
from tests.sandbox.needs import needs_local


def test_the_tasks_that_come_with_palestra_are_listed_and_exported(tmp_path: Path) -> None:
    found = json.loads(palestra("agent", "task", "list", "--json").stdout)
    assert len(found) == 40
    assert {one["problem"] for one in found} == {None}
    assert "1-bump-version" in palestra("agent", "task", "list").stdout
    assert palestra("agent", "task", "list", "--export", tmp_path).stdout == f"40 tasks are in {tmp_path}\n"
    assert (tmp_path / "1-bump-version" / "tests" / "test.sh").is_file()
    assert "is there already" in palestra("agent", "task", "list", "--export", tmp_path).stderr


def test_a_task_that_cannot_be_played_here_is_listed_with_the_reason(tmp_path: Path) -> None:
    folders.harbor(tmp_path / "good")
    folders.harbor(tmp_path / "bad", **{"environment/Dockerfile": "FROM x\nWORKDIR /a\nRUN pip install x\n"})
    done = palestra("agent", "task", "list", tmp_path)
    assert done.exit_code == 1
    assert "no: bad cannot be played with the backend 'local'" in done.stdout
    assert palestra("agent", "task", "list", tmp_path, "--sandbox", "podman").exit_code == 0
    assert palestra("agent", "task", "list", tmp_path / "none").exit_code == 2


@needs_local
def test_the_verifiers_reward_for_a_solution_is_printed(tmp_path: Path) -> None:
    done = palestra("agent", "verify", "1-bump-version")
    assert (done.exit_code, done.stdout.split()) == (0, ["1-bump-version", "1", "tests", "1"])
    nothing = palestra("agent", "verify", "1-bump-version", "--solution", "none", "--json", "--log")
    assert nothing.exit_code == 0
    assert json.loads(nothing.stdout)[0]["reward"] == 0.0
    wrong = folders.harbor(tmp_path, **{"solution/solve.sh": "echo 41 > answer.txt"})
    assert palestra("agent", "verify", wrong).exit_code == 1
    assert palestra("agent", "verify", wrong, "--solution", "echo 42 > answer.txt").stdout.split()[1] == "1"


def test_rows_that_cannot_be_read_are_an_error_in_a_line(tmp_path: Path) -> None:
    done = palestra("agent", "convert", tmp_path / "rows.jsonl", tmp_path / "tasks")
    assert done.exit_code == 2
    assert "cannot be read" in done.stderr
