"""`palestra train` as a child process, small enough for tests."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from palestra.cli import main
from tests.waiting import until
from tests.warm_start import ClientProcess, start_client

SMALL = {
    "environments": [{"name": "arithmetic"}],
    "rollout": {"group_size": 4, "groups_per_step": 4, "max_tokens": 48, "max_context": 640},
    "optimizer": {"lr": 2e-3, "warmup_steps": 0, "schedule": "constant"},
    "steps": 5,
    "eval": {"every": 0},
    "checkpoint": {"every": 2},
}
"""A GRPO run of less than a second for each step."""
FEW = {"groups_per_step": 2}
"""`rollout=FEW`: half as many rollouts, where their number does not matter."""
TOOLS = {"environments": [{"name": "stockroom"}]}
"""Rollouts of several turns, which take a few times as long."""


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Maps are merged, anything else replaced."""
    both = base.keys() & changes.keys()
    inner = {key: merged(base[key], changes[key]) for key in both if isinstance(changes[key], dict)}
    return {**base, **changes, **inner}


def train(*arguments: str) -> tuple[int, str]:
    """`palestra train` in this process and its folder: the exit code and what it says."""
    result = CliRunner().invoke(main, ["train", *arguments])
    return result.exit_code, result.output


def start(folder: Path, *arguments: str) -> ClientProcess:
    return start_client("train", *arguments, "--display", "lines", cwd=folder)


def finish(process: ClientProcess) -> str:
    try:
        said, _ = process.communicate(timeout=110)
    except subprocess.TimeoutExpired:
        process.kill()  # it would go on at a server that other tests use
        raise AssertionError(f"still running after 110 s; it printed:\n{process.said()}") from None
    assert process.returncode == 0, said
    return said


def wait_for_steps(folder: Path, name: str, steps: int, process: ClientProcess) -> None:
    file = folder / "runs" / name / "metrics.jsonl"

    def has_come_so_far() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return file.exists() and len(file.read_bytes().splitlines()) >= steps

    until(has_come_so_far, timeout_s=100)


def kill(process: ClientProcess) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
