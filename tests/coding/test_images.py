"""Tasks in containers: the image is built of the task's Dockerfile, and has neither tests nor solution."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from palestra.coding import play_solution, read_task
from palestra.sandbox import backend
from tests.coding import folders
from tests.sandbox import images

DOCKERFILE = f"""FROM {images.NAME}
RUN ["sh", "-c", "mkdir /app && echo built > /app/made.txt"]
WORKDIR /app
COPY . .
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", ["docker", "podman"])
@pytest.mark.parametrize("make", [folders.harbor, folders.terminal_bench])
def test_a_task_is_played_in_the_image_of_its_dockerfile(program: str, make: object, tmp_path: Path) -> None:
    if problem := backend(program).problem() or images.problem(program):
        pytest.skip(problem)
    is_harbor = make is folders.harbor
    name = "environment/Dockerfile" if is_harbor else "Dockerfile"
    script = (
        {"tests/test.sh": folders.TEST_SH.replace("/bin/bash", "/bin/sh")}
        if is_harbor
        else {"run-tests.sh": "#!/bin/sh\nsh /tests/summary.sh\n"}
    )
    task = read_task(
        (folders.harbor if is_harbor else folders.terminal_bench)(tmp_path, **{name: DOCKERFILE}, **script)
    )
    assert task.needs_image
    right = 'test "$(cat made.txt)" = built && test ! -e tests && test ! -e /tests && echo 42 > answer.txt'
    assert asyncio.run(play_solution(task, program, right)).reward == 1.0
    assert asyncio.run(play_solution(task, program, "true")).reward == 0.0
