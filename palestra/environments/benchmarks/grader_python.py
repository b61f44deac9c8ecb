"""The Python in which a package grades: the one that is named, one of its own, or ours.

A folder of graders has a virtual environment for each package: `PALESTRA_GRADERS`, or `palestra/graders` in the user's
cache.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from palestra.environments.benchmarks.catalogue import Benchmark, GraderPackage
from palestra.environments.errors import TaskFileError
from palestra.environments.grading.grader_processes import START_S, script_of

VARIABLE = "PALESTRA_GRADERS"


def grader_python(benchmark: Benchmark, given: str | None) -> Path:
    """Returns an absolute path; a virtual environment is known by it, so no link is followed. Raises TaskFileError."""
    package = benchmark.package
    assert package is not None
    if given is not None:
        named = Path(given).expanduser().absolute()
        if not os.access(named, os.X_OK):
            raise TaskFileError(f"{benchmark.name}: {named} is no program (--grader {benchmark.name}=PYTHON)")
        return named
    own = _own_python(package)
    if own.is_file():
        return own
    if importlib.util.find_spec(package.module) is not None:
        return Path(sys.executable)
    raise TaskFileError(f"{benchmark.name}: its grader {package.module} is not installed; {how_to_install(benchmark)}")


def how_to_install(benchmark: Benchmark) -> str:
    package = benchmark.package
    assert package is not None
    own = _own_python(package)
    lines = [f"python3 -m venv {own.parent.parent}", f"{own} -m pip install {package.install}"]
    more = [package.more.format(python=own)] if package.more else []
    choice = f"or name a Python that has it: --grader {benchmark.name}=PYTHON"
    return "\n  ".join(["to install it:", *lines, *more, choice])


@cache
def tasks_from(module: str, python: Path, *arguments: str) -> list[dict[str, object]]:
    """Asks a grader's module for what it has before anything is played: a JSON list. Raises TaskFileError."""
    command = [str(python), script_of(module), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=2 * START_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TaskFileError(f"{python} cannot run {module}: {error}") from None
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        raise TaskFileError(f"{python} cannot run {module}: {last[0]}")
    return json.loads(done.stdout)


def _own_python(package: GraderPackage) -> Path:
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    folder = Path(os.environ.get(VARIABLE) or cache_folder / "palestra" / "graders").expanduser().absolute()
    return folder / package.name / "bin" / "python"
