"""Runs agents and frameworks behind the sandbox's wall: a home and a folder of their own, no network but our server."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from palestra.episodes import Episode
from palestra.sandbox import EndpointProxy, ExecResult, SandboxError, SandboxLimits, SandboxSpec, backend, sandbox
from palestra.sandbox.spec import SEARCH_PATH

INSTALLED = (Path(__file__).parents[2] / ".agents").resolve()
LIMIT_S = 240.0  # opencode takes twenty seconds on a machine that is busy
WORKDIR = "/episode"


@dataclass(frozen=True)
class WalledRun:
    done: ExecResult
    written: str
    """What is in out.txt, the file that tasks ask for; empty if there is none."""

    @property
    def said(self) -> str:
        """All that it wrote to its standard output and errors."""
        return self.done.text + self.done.stderr.decode(errors="replace")


def run_walled(
    program: Path,
    arguments: Sequence[str],
    episode: Episode,
    env: Mapping[str, str],
    files: Mapping[str, str],
) -> WalledRun:
    """Runs an installed program to its end. The endpoint proxy appears at the server's own port: every address stays as
    it was. Skips the test where the program or the wall is missing."""
    if not program.exists():
        pytest.skip(f"{program.name} is not installed; run: make agents")
    if problem := backend("local").problem():
        pytest.skip(problem)
    port = urlsplit(episode.base_url).port
    assert port is not None
    node = Path(shutil.which("node") or "/usr/bin/node").resolve()
    spec = SandboxSpec(
        workdir=WORKDIR,
        host_folders=(str(INSTALLED), *_outside_usr(node), *_outside_usr(program.resolve())),
        endpoint_proxy=EndpointProxy(episode.base_url, port=port),
        env={**episode.environment, "PATH": f"{node.parent}:{SEARCH_PATH}", **env},
        files={name: text.encode() for name, text in files.items()},
        limits=SandboxLimits(exec_s=LIMIT_S),
    )
    return asyncio.run(_run(spec, [str(program), *arguments]))


def _outside_usr(interpreter: Path) -> list[str]:
    """The folder in which an interpreter is installed, where the sandbox would not see it."""
    seen = (Path("/usr"), INSTALLED)
    return [] if any(interpreter.is_relative_to(one) for one in seen) else [str(interpreter.parents[1])]


async def _run(spec: SandboxSpec, command: list[str]) -> WalledRun:
    async with sandbox("local", spec) as box:
        done = await box.exec(command)
        try:
            written = (await box.read("out.txt")).decode().strip()
        except SandboxError:
            written = ""
        return WalledRun(done, written)
