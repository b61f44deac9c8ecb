"""What `make` says while it takes its time."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SLOW = 'echo "Downloading torch"; until [ -e {file} ]; do sleep 0.1; done; echo "no room left"; exit 7'


def make(*arguments: str) -> subprocess.Popen[str]:
    command = ["make", "--no-print-directory", "-C", str(ROOT), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_what_takes_long_tells_what_it_is_at_and_why_it_failed(tmp_path):
    command = SLOW.format(file=tmp_path / "go").replace("$", "$$")
    with make("--eval", f"slow: ; @$(PROGRESS) sh -c '{command}'", "slow") as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(2)]
        finally:
            (tmp_path / "go").touch()
        _, wrong = process.communicate(timeout=60)
    assert all(line.endswith(" s  Downloading torch\n") for line in lines)
    assert process.returncode == 2
    assert "no room left" in wrong
    assert "Error 7" in wrong


def test_every_long_part_of_making_the_environment_tells_what_it_is_at():
    with make("--dry-run", "--always-make", ".venv/.ready") as process:
        said, _ = process.communicate(timeout=60)
    long = [line for line in said.splitlines() if "pip" in line or "-m venv" in line]
    assert len(long) == 3
    assert all("sleep 3; do echo" in line for line in long)
