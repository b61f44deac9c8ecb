"""Environments of packages, tested with the packages: they are in a venv of their own, beside those of ours."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from palestra.config.train import load_train_config
from palestra.runs.reader import RunReader

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-reasoning-gym" / "bin" / "python"


@pytest.mark.e2e
@pytest.mark.skipif(not PYTHON.exists(), reason="needs a venv with reasoning-gym and TextArena: make clients")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", ["reasoning_gym", "textarena"])
def test_with_the_real_package(package: str):
    options = ["-q", "-n", "0", "-p", "no:cacheprovider"]
    command = [PYTHON, "-m", "pytest", *options, f"tests/environments/test_{package}.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("package", ["reasoning-gym", "textarena", "verifiers"])
def test_the_example_loads(package: str):
    entries = load_train_config([ROOT / "examples" / f"{package}.yaml"], []).environments
    assert entries
    assert all(entry.name.startswith(f"{package.replace('-', '_')}:") for entry in entries)


@pytest.mark.e2e
@pytest.mark.skipif(not PYTHON.exists(), reason="needs a venv with reasoning-gym and TextArena: make clients")
def test_the_example_of_reasoning_gym_has_what_it_names():
    command = [PYTHON, "-m", "palestra", "train", "examples/reasoning-gym.yaml", "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON.exists(), reason="needs a venv with reasoning-gym and TextArena: make clients")
def test_the_example_of_textarena_imitates_and_then_has_something_to_learn(tmp_path: Path):
    fewer = ["steps=2", "rollout.groups_per_step=6", "eval.every=0", f"runs={tmp_path}"]
    command = [PYTHON, "-m", "palestra", "train", "examples/textarena.yaml", "--name", "few", *fewer]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in RunReader(tmp_path / "few").read_metrics() if row["step"]]
    assert [row["optim/grad_norm"] > 0 for row in rows] == [True] * 2
    assert all(row["reward/mean"] > 0.2 for row in rows), rows  # guesses are written as the game reads them
