"""Scratch folders of verifiers: a killed process leaves nothing for long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

USED = "from palestra.coding.scratch import scratch_folder\nwith scratch_folder() as folder:\n    print(folder)\n"
KILLED = USED + "    import os\n    os.kill(os.getpid(), 9)\n"


def run(program: str, folder: Path) -> int:
    return subprocess.run([sys.executable, "-uc", program], env={"TMPDIR": str(folder)}, check=False).returncode


def test_what_a_killed_verifier_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    assert run(KILLED, tmp_path) == -9
    (base,) = tmp_path.iterdir()
    assert len(list(base.iterdir())) == 1
    assert run(USED, tmp_path) == 0
    assert not list(base.iterdir())
