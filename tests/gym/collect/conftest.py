"""A model endpoint, and the command line."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from palestra.cli import main

UPSTREAM = Path(__file__).parent / "upstream.py"
MCQA = (
    "-c",
    "resources_servers/mcqa/configs/mcqa.yaml",
    "-c",
    "responses_api_models/vllm_model/configs/vllm_model.yaml",
)


@pytest.fixture(scope="session")
def start_upstream() -> Iterator[Callable[[float], str]]:
    """Starts one that takes so many seconds for each answer, and gives its address."""
    running: list[subprocess.Popen[bytes]] = []

    def start(delay_s: float) -> str:
        command = [sys.executable, str(UPSTREAM), str(delay_s)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        running.append(process)
        assert process.stdout is not None
        return process.stdout.readline().decode().strip()

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def upstream(start_upstream: Callable[[float], str]) -> str:
    return start_upstream(0.0)


def policy(url: str, model: str = "steady") -> list[str]:
    return ["--model-url", url, "--model-api-key", "x", "-m", model]


def palestra(*arguments: str | Path, cwd: Path, code: int = 0) -> str:
    """What `palestra gym` says, run in this process."""
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(main, ["gym", *map(str, arguments)], prog_name="palestra")
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


def write_rows(path: Path, count: int) -> Path:
    """Half of them answered right by one who always says B."""
    rows: list[dict[str, Any]] = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"question {at}"}]},
            "options": [{"A": "yes"}, {"B": "no"}],
            "expected_answer": "AB"[at % 2],
        }
        for at in range(count)
    ]
    path.write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in rows))
    return path
