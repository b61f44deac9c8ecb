"""Child processes: started in a group of their own, and ended with all that they started."""

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
from typing import IO, Protocol

DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
LOOK_S = 0.02
Stream = int | IO[bytes] | None
"""None: the stream of the parent."""


class GroupLeader(Protocol):
    """A process that leads a group of its own: a child of `spawn`, or one that another process has forked for us."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """The exit code. None: the process runs."""
        ...

    async def wait(self) -> int | None: ...

    def terminate(self) -> None: ...


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
    """Starts a process in its own session: Ctrl-C goes to the parent, which ends its children itself. A child whose
    stdin is a pipe notices the end of the parent by the end of the pipe. Raises OSError where there is no such
    program."""
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
    """Spawns like `spawn`, without an event loop: for a child that may outlive its parent, and for threads."""
    return subprocess.Popen(command, stdin=stdin, stdout=output, stderr=output, env=env, start_new_session=True)


async def stop(process: GroupLeader, patience_s: float) -> None:
    """Asks the process to end, and kills its group after `patience_s`."""
    if process.returncode is None:
        process.terminate()
    deadline = time.monotonic() + patience_s
    while process.returncode is None and time.monotonic() < deadline:  # noqa: ASYNC110
        # `wait` would also wait for its pipes, which children of its own may hold.
        await asyncio.sleep(LOOK_S)
    signal_group(process.pid, signal.SIGKILL)
    await process.wait()


async def kill(process: GroupLeader) -> None:
    """Kills the process and its group; it has ended when this returns or is cancelled."""
    if process.returncode is None:  # the number of one that ended long ago may be another process's
        signal_group(process.pid, signal.SIGKILL)
    await asyncio.shield(asyncio.ensure_future(process.wait()))


def signal_group(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a child of `spawn` and all that it started; does nothing if they have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
