"""The training process of an engine: `palestra train` as a child process that ends with the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from msgspec import Struct

from palestra.util import processes
from palestra.util.log_files import last_error, last_output, open_log

STOP_S = 20.0  # the process logs off from the server, and saves nothing


class ProcessMark(Struct, frozen=True):
    """Identifies a process: process ids are reused."""

    pid: int
    born: float


def put_down(mark: ProcessMark) -> None:
    """Ends the child process of a server that was killed: it would take some seconds to stop by itself, and hold its
    run meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(mark.pid)
        if abs(process.create_time() - mark.born) < 1:  # the clock may have been adjusted a little
            processes.signal_group(mark.pid, signal.SIGKILL)
            process.wait(STOP_S)


class TrainingProcess:
    def __init__(self, process: asyncio.subprocess.Process, log_file: Path):
        self._process, self.log_file = process, log_file

    @classmethod
    async def start(cls, arguments: Sequence[str], folder: Path, log_file: Path, key: str | None) -> TrainingProcess:
        """Starts the process. `key` is a key of this server, if it needs one. It is passed by the environment, because
        every user can read command lines."""
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        environment.pop("TINKER_API_KEY", None)
        if key is not None:
            environment["TINKER_API_KEY"] = key
        log = await asyncio.to_thread(open_log, log_file)
        with log:
            process = await processes.spawn(
                *(sys.executable, "-m", "palestra.cli", "train", *arguments, "--display", "lines", "--with-parent"),
                stdin=processes.PIPE,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=environment,
            )
        return cls(process, log_file)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def mark(self) -> ProcessMark:
        try:
            return ProcessMark(self.pid, psutil.Process(self.pid).create_time())
        except psutil.NoSuchProcess:
            return ProcessMark(self.pid, 0.0)

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self) -> None:
        await processes.stop(self._process, STOP_S)

    def last_output(self) -> str:
        """Returns the error that it printed, or else its last line."""
        return (last_error(self.log_file) or last_output(self.log_file)).splitlines()[0]
