"""The cookbook's on-policy distillation and ours agree: on the same rows to rounding, as students to noise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("PALESTRA_COOKBOOK_PYTHON") or ROOT / ".venv-cookbook" / "bin" / "python")


@pytest.mark.e2e
@pytest.mark.skipif(not PYTHON.exists(), reason="needs a venv with tinker-cookbook: make clients")
def test_two_students_of_one_teacher_learn_alike(tmp_path: Path):
    command = [sys.executable, str(ROOT / "cookbook" / "distillation.py"), "--python", str(PYTHON)]
    done = subprocess.run([*command, "--work", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
