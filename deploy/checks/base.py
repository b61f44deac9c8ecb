"""What the checks share: a folder for what they make, commands, and what a check may say."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SMOKE = DEPLOY / "smoke.py"
TAIL = 3000  # characters of a failed command that are shown


class CheckFailed(Exception):
    """Something is wrong with what was checked."""


class CheckSkipped(Exception):
    """This machine cannot run the check; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where checks put what they make. It is kept, so that the next time is shorter."""

    folder: Path

    def path(self, name: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / name

    def fresh(self, name: str) -> Path:
        """An empty folder."""
        shutil.rmtree(path := self.path(name), ignore_errors=True)
        path.mkdir()
        return path


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Returns what a command said. Raises CheckFailed with the end of it."""
    argv = [str(word) for word in command]
    done = subprocess.run(
        argv,
        env=os.environ | (env or {}),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise CheckFailed(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout[-TAIL:]}")
    return done.stdout


def need(program: str, package: str) -> str:
    """The path of a program. Raises CheckSkipped."""
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if found is None:
        raise CheckSkipped(f"{program} is not installed (Debian's package {package} has it)")
    return found


def need_root() -> None:
    if os.geteuid():
        raise CheckSkipped("it needs root")


def tool(name: str) -> Path:
    """A program of the environment of this script."""
    return Path(sys.executable).with_name(name)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def smoke(port: int, *arguments: str | Path) -> str:
    """Runs the smoke script; returns its last line."""
    output = run(sys.executable, SMOKE, "--url", f"http://127.0.0.1:{port}", "--key", "tml-smoke", *arguments)
    return [line for line in output.splitlines() if line.startswith("smoke:")][-1]
