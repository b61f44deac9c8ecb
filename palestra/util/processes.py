"""Child processes: started in a group of their own, and ended with all that they started.

Owns: how children are started and ended. Never touches: what they are asked, when they are started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
LOOK_S = 0.02
Stream = int | IO[bytes] | None
"""None: the parent's own."""


async def spawn(
    *command: str | Path,
    stdin: Stream = DEVNULL,
    stdout: Stream = DEVNULL,
    stderr: Stream = DEVNULL,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    pass_fds: Sequence[int] = (),
    limit: int = 1 << 16,
) -> Process:
    """In a session of its own: Ctrl-C is for the parent, which ends its children itself. A child whose stdin is a pipe
    can tell the parent's end, however it comes, by the pipe's. Raises OSError where there is no such program."""
    return await asyncio.create_subprocess_exec(
        *map(str, command),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=env,
        cwd=cwd,
        pass_fds=pass_fds,
        limit=limit,
        start_new_session=True,
    )


def spawn_blocking(
    command: Sequence[str], *, stdin: Stream = DEVNULL, output: Stream = DEVNULL, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """As `spawn`, without a loop that watches it: for a child that may outlive its parent, and for threads."""
    return subprocess.Popen(command, stdin=stdin, stdout=output, stderr=output, env=env, start_new_session=True)


async def stop(process: Process, patience_s: float) -> None:
    """It is asked to end, and after `patience_s` made to, with whoever is left of its group."""
    if process.returncode is None:
        process.terminate()
    deadline = time.monotonic() + patience_s
    while process.returncode is None and time.monotonic() < deadline:  # noqa: ASYNC110
        # `wait` would also wait for its pipes, which children of its own may hold.
        await asyncio.sleep(LOOK_S)
    await kill(process)


async def kill(process: Process) -> None:
    """With its group, also where it has ended already. Has happened when this returns, or is cancelled."""
    signal_group(process.pid, signal.SIGKILL)
    await asyncio.shield(asyncio.ensure_future(process.wait()))


def signal_group(pid: int, number: signal.Signals) -> None:
    """To a child of `spawn` and all that it started. Nothing where they are gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
