"""Test scripts in the form that Harbor's and Terminal-Bench's templates have run without a network."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from palestra.coding import CodingVerdict, VerifierError, play_solution, read_task
from tests.coding import folders
from tests.sandbox.needs import PACKAGES, needs_local, needs_packages

pytestmark = [needs_local, needs_packages]

TEST = "from pathlib import Path\n\n\ndef test_answer():\n    assert Path('/app/answer.txt').read_text() == '42\\n'\n"
HARBOR = """#!/bin/bash
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.9.7/install.sh | sh
source $HOME/.local/bin/env
if uvx \\
  -p 3.13 \\
  -w pytest==8.4.1 \\
  -w pytest-json-ctrf==0.3.5 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
TERMINAL_BENCH = """#!/bin/bash
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.7.13/install.sh | sh
source $HOME/.local/bin/env
if [ "$PWD" = "/" ]; then exit 1; fi
uv init
uv add pytest==8.4.1
uv run pytest $TEST_DIR/test_outputs.py -rA
"""


def play(folder: Path, command: str | None = None) -> CodingVerdict:
    return asyncio.run(play_solution(read_task(folder), command=command, host_folders=(PACKAGES,)))


@pytest.mark.slow
def test_the_usual_test_scripts_run_as_they_are(tmp_path: Path) -> None:
    python = {"environment/Dockerfile": f"FROM x\nWORKDIR /app\nENV PYTHONPATH={PACKAGES}\n"}
    harbor = folders.harbor(tmp_path / "h", **python, **{"tests/test.sh": HARBOR, "tests/test_outputs.py": TEST})
    assert play(harbor).reward == 1.0
    assert play(harbor, "true").reward == 0.0
    older = {"Dockerfile": python["environment/Dockerfile"], "run-tests.sh": TERMINAL_BENCH}
    older |= {"tests/test_outputs.py": TEST}
    assert play(folders.terminal_bench(tmp_path / "t", **older)).reward == 1.0
    assert play(tmp_path / "t", "true").reward == 0.0


def test_what_the_sandbox_does_not_have_is_the_verifiers_failure(tmp_path: Path) -> None:
    script = HARBOR.replace("-w pytest==8.4.1", "-w no-such-package>=2")
    folder = folders.harbor(tmp_path, **{"tests/test.sh": script, "tests/test_outputs.py": TEST})
    with pytest.raises(VerifierError, match=r"need what python3 in the sandbox does not have: .*no-such-package"):
        play(folder)
