"""Coding tasks, a puppet that solves them with the shell agent, and runs that `palestra agent play` plays."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from palestra.cli import main
from palestra.sandbox import backend
from palestra.testing.puppet import Cue
from tests.agents.conftest import PuppetServer
from tests.agents.programs import tool_call
from tests.coding.folders import harbor
from tests.server.conftest import KEY

_numbers = itertools.count()

SOLVES, SHIRKS, REFUSES, DAWDLES = "task-solve", "task-shirk", "task-refuse", "task-dawdle"
MARK = f"sleep {100_000 + os.getpid()}"
"""In the command line of an agent's tool that takes long, of this test process only."""
SCRIPT = [
    Cue(when=SOLVES, say=tool_call("bash", command="echo 42 > answer.txt; echo wrote-it")),
    Cue(when="wrote-it", say="The file is there."),
    Cue(when=SHIRKS, say=tool_call("bash", command="cat question.txt; echo looked-only")),
    Cue(when="looked-only", say="Nothing must change"),
    Cue(when=REFUSES, say="We would rather not"),
    Cue(when=DAWDLES, say=tool_call("bash", command=f"echo 42 > answer.txt; echo slept-long; {MARK}")),
]
"""What the puppet lets the shell agent do, by words in the task's instruction."""


def write_tasks(folder: Path, **settings: str) -> Path:
    """A folder of tasks, one for each first cue."""
    for name in (SOLVES, SHIRKS, REFUSES, DAWDLES):
        harbor(folder / name, **{"instruction.md": f"Please do {name}.\n", **settings})
    return folder


def needs_wall() -> None:
    if problem := backend("local").problem():
        pytest.skip(problem)


@dataclass
class CodingRun:
    """A run whose episodes are tasks, by their names."""

    server: PuppetServer
    name: str = field(default_factory=lambda: f"coding-{next(_numbers)}")

    def register(self, *tasks: str, size: int = 1, **settings: Any) -> CodingRun:
        http = self.server.http()
        http.put(f"/episodes/v1/runs/{self.name}", json={"model": "puppet", "settings": settings}).raise_for_status()
        groups = [
            {"group_id": f"g/{task}", "size": size, "task": {"id": task, "environment": "coding", "prompt": []}}
            for task in tasks
        ]
        http.post(f"/episodes/v1/runs/{self.name}/groups", json={"groups": groups}).raise_for_status()
        return self

    def played(self) -> list[dict[str, Any]]:
        """The episodes as their trainer gets them."""
        answer = self.server.http().get(f"/episodes/v1/runs/{self.name}/groups", params={"wait_s": 60})
        return [episode for group in answer.raise_for_status().json()["groups"] for episode in group["episodes"]]

    def info(self) -> dict[str, Any]:
        return self.server.http().get(f"/episodes/v1/runs/{self.name}").raise_for_status().json()

    def command(self, tasks: Path, *words: str) -> list[str]:
        """Arguments of `palestra agent play` for this run."""
        own = ["agent", "play", "--tasks", str(tasks), "--run", self.name, "--server", self.server.url, "--key", KEY]
        return [*own, *words]

    @contextmanager
    def playing(self, folder: Path, tasks: Path, *words: str, **env: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [sys.executable, "-m", "palestra.cli", *self.command(tasks, *words)],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **env},
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def play(self, folder: Path, tasks: Path, *words: str, **env: str) -> str:
        """Plays in this process until nothing waits; returns what the player printed."""
        with chdir(folder):
            done = CliRunner().invoke(main, self.command(tasks, "--idle", "1", *words), env=env)
        assert done.exit_code == 0, done.output
        return done.output

    def records(self, folder: Path) -> Mapping[str, str]:
        """The files that were kept of the one episode."""
        (kept,) = (folder / "agent-episodes" / self.name).iterdir()
        return {file.name: file.read_text() for file in kept.iterdir()}


def agents_alive() -> list[psutil.Process]:
    """Processes of this machine that are an agent's tool that takes long."""
    found = []
    for process in psutil.process_iter():
        try:
            if MARK in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found
