"""With the real skyrl-gym in a venv of its own: `fleet_task` is one of its environments."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.environments.fleet.conftest import LARGEST, PUT

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("PALESTRA_SKYRL_PYTHON") or ROOT / ".venv-skyrl" / "bin" / "python")
MAIL = "mail-move_only-0-3"


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="needs a venv with skyrl-gym, msgspec, pydantic, pytest: make clients"
    ),
]


def ran(*command: str | Path) -> str:
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [PYTHON, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_skyrl_makes_plays_and_counts_it():
    response = json.loads(ran(Path(__file__).with_name("skyrl_walk.py"), PUT, LARGEST, MAIL).splitlines()[-1])
    same = {"roles": ["system", "user"], "max_turns": 20, "episodes": 1}
    expected = [same | {"env_key": app, "reward": reward} for app in ("keys", "keys", "mail") for reward in (1.0, 0.0)]
    assert response == {"seen": expected, "live": 0}


def test_its_own_environments_run_here():
    """The file is skipped where skyrl-gym is not installed, as in our own environment."""
    options = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ROOT, "--noconftest")
    response = ran("-m", "pytest", *options, "tests/environments/test_skyrl_gym.py")
    assert "passed" in response
    assert "skipped" not in response
