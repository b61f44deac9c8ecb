"""Warm-up tasks: the solution is worth 1, no cheat is worth anything, and a number is a task."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from palestra.cli import main
from palestra.coding import play_solution, read_task, read_tasks
from palestra.coding.cheats import CHEATS, WRECKS
from palestra.coding.warm_up import KINDS, warm_up_task, write_warm_up
from tests.sandbox.needs import needs_local

EVERY_DAY = {"remove"}
WRECKS_HERE = {**WRECKS, "copying over everything": "for file in *; do cp keep.txt $file; done"}


@needs_local
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=kind.__name__, marks=[] if kind.__name__ in EVERY_DAY else pytest.mark.slow)
        for number, kind in enumerate(KINDS)
    ],
)
def test_only_solving_a_task_is_worth_something(tmp_path: Path, number: int) -> None:
    (folder,) = write_warm_up(tmp_path, 1, number)
    task = read_task(folder)
    assert asyncio.run(play_solution(task)).reward == 1.0
    for name, command in {**CHEATS, **WRECKS_HERE}.items():
        assert asyncio.run(play_solution(task, command=command)).reward == 0.0, name


def test_a_number_is_a_task_and_twelve_in_a_row_are_of_twelve_kinds() -> None:
    assert [warm_up_task(number) for number in range(24)] == [warm_up_task(number) for number in range(24)]
    assert len({warm_up_task(number).kind for number in range(100, 112)}) == len(KINDS)


def test_held_out_tasks_name_files_that_no_other_task_names() -> None:
    trained, held_out = ({warm_up_task(n, is_held_out).slots[0] for n in range(600)} for is_held_out in (False, True))
    assert trained
    assert held_out
    assert not trained & held_out


def test_the_command_writes_folders_that_are_read_as_tasks(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["agent", "warm-up", str(tmp_path / "made"), "--count", "3", "--first", "5"])
    assert (done.exit_code, done.output.split(";")[0]) == (0, f"3 tasks are in {tmp_path / 'made'}")
    tasks = read_tasks(tmp_path / "made")
    assert {task.level for task in tasks} == {"0"}
    assert [task.id for task in tasks] == ["0-00005-copy", "0-00006-link", "0-00007-count"]
