"""The tasks that come with Palestra, and how they become folders that need nothing of ours."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from palestra.coding.errors import TaskError
from palestra.coding.harbor import CASES, TEST_SCRIPT, WORKDIR
from palestra.coding.task import CodingTask

SHIPPED = Path(__file__).parent / "shipped"
DOCKERFILE = f"FROM python:3.12\nWORKDIR {WORKDIR}\nCOPY . .\n"
RUN_CASES = f"""#!/bin/sh
# The reward is 1 if every command of {CASES} prints what follows it, else 0.
python3 -I - <<'END' > /logs/verifier/reward.txt
import subprocess

cases = []
for line in open("/tests/{CASES}", encoding="utf-8").read().splitlines():
    if line.startswith("$ "):
        cases.append((line[2:], []))
    else:
        cases[-1][1].append(line)
is_right = True
for command, expected in cases:
    done = subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    status = [f"[{{done.returncode}}]"] if done.returncode else []
    text = done.stdout.decode(errors="replace").rstrip("\\n")
    is_right &= [*(text.split("\\n") if text else []), *status] == expected
print(int(is_right))
END
"""


def export(tasks: Iterable[CodingTask], folder: Path) -> list[Path]:
    """Copies tasks into a folder, each with a Dockerfile and a test script, so that Harbor runs them as well. Raises
    TaskError where a task is there already."""
    made: list[Path] = []
    for task in tasks:
        target = folder / task.id
        if target.exists():
            raise TaskError(f"{target} is there already; name another folder")
        shutil.copytree(task.folder, target)
        for name, text in (("environment/Dockerfile", DOCKERFILE), (f"tests/{TEST_SCRIPT}", RUN_CASES)):
            if not (target / name).exists():
                (target / name).write_text(text, encoding="utf-8")
        made.append(target)
    return made
