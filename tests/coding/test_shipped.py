"""The tasks that come with Palestra: the solution is worth 1, and neither nothing nor any cheat is worth anything."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path

import pytest

from palestra.coding import CodingTask, play_solution, prepare, read_tasks, task_spec
from palestra.coding.cheats import CHEATS
from palestra.coding.shipped_tasks import SHIPPED, export
from palestra.sandbox import sandbox
from tests.sandbox.needs import needs_local

TASKS = read_tasks(SHIPPED)
EVERY_DAY = {"2-line-counter", "4-json-pointer"}


def test_there_are_forty_of_four_levels() -> None:
    assert Counter(task.level for task in TASKS) == {"1": 10, "2": 10, "3": 10, "4": 10}
    assert {tag for task in TASKS for tag in task.tags} == {"python", "shell"}
    assert all(task.solution and not task.needs_image and not task.needs_network for task in TASKS)


@needs_local
@pytest.mark.parametrize(
    "task",
    [pytest.param(one, id=one.id, marks=[] if one.id in EVERY_DAY else pytest.mark.slow) for one in TASKS],
)
def test_only_solving_a_task_is_worth_something(task: CodingTask) -> None:
    gold = asyncio.run(play_solution(task))
    assert (gold.reward, gold.parts) == (1.0, {"tests": 1.0}), gold.log
    for name, command in CHEATS.items():
        assert asyncio.run(play_solution(task, command=command)).reward == 0.0, name


@needs_local
def test_nothing_of_tests_and_solution_is_in_the_agents_sandbox() -> None:
    async def seen(task: CodingTask) -> str:
        async with sandbox("local", await task_spec(task)) as box:
            await prepare(task, box)
            return (await box.exec("find /app /tests /solution /logs -type f; env")).text

    text = asyncio.run(seen(TASKS[0]))
    assert "/app/" in text
    assert not any(word in text for word in ("cases", "solve", "/tests", "/solution", str(SHIPPED)))


@needs_local
def test_an_exported_task_runs_in_harbors_format_alone(tmp_path: Path) -> None:
    task = next(one for one in TASKS if one.id == "2-slug")
    (folder,) = export([task], tmp_path)
    assert (folder / "environment" / "Dockerfile").read_text().startswith("FROM ")
    (plain,) = read_tasks(folder)
    assert [one.path for one in plain.files] == ["/app/slug.py"]
    shutil.move(folder / "tests" / "cases.txt", folder / "tests" / "transcript.txt")
    script = folder / "tests" / "test.sh"
    script.write_text(script.read_text().replace("cases.txt", "transcript.txt"))
    (plain,) = read_tasks(folder)
    assert plain.test_script == "test.sh"
    assert asyncio.run(play_solution(plain)).reward == 1.0
    assert asyncio.run(play_solution(plain, command="true")).reward == 0.0
