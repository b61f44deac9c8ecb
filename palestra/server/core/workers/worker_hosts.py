"""Hosts of workers' processes: this machine, or others (`ray_host`).

Owns: starting them here, finding those that an earlier server has started. Never touches: what they say, restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from palestra.types.engine import PRELOAD, PRELOAD_GO, WorkerConfig
from palestra.util.atomic_files import replacing
from palestra.util.json_types import JsonObject
from palestra.util.log_files import open_log
from palestra.util.processes import spawn_blocking


class RunningWorker(Protocol):
    """The process of a worker, or the processes of a group of ranks."""

    @property
    def pid(self) -> int:
        """Process id of rank 0, on its machine."""
        ...

    @property
    def where(self) -> str:
        """The worker's machine, for logs; empty: this one."""
        ...

    @property
    def facts(self) -> JsonObject:
        """Facts by which the next server finds the worker."""
        ...

    @property
    def returncode(self) -> int | None:
        """The exit code. None: the worker runs, or how it ended is not known."""
        ...

    async def wait(self) -> None:
        """Waits for its end."""
        ...

    def terminate(self) -> None:
        """Asks it to end in order."""
        ...

    def kill(self) -> None: ...

    def leave(self) -> None:
        """Stops watching it; it goes on."""
        ...


class WorkerHost(Protocol):
    async def start(self, config: WorkerConfig, log_file: Path) -> RunningWorker:
        """Starts a worker, whose output goes to the log file. Raises OSError or NotPlaced, after which another try may
        succeed."""
        ...

    async def find(self, known: JsonObject, log_file: Path) -> RunningWorker | None:
        """Returns the worker with these facts, if it runs."""
        ...

    async def wait_until_draining(self) -> None:
        """Returns when the worker has to go elsewhere."""
        ...

    async def close(self) -> None:
        """Called when the worker has ended for good."""
        ...


def start_here(config: WorkerConfig, log_file: Path, *, token: str = "") -> LocalWorker:
    """Starts a worker on this machine. With a token it loads its model and waits until `LocalHost` goes on with it."""
    environment = os.environ | environment_of(config)
    if token:
        environment[PRELOAD] = f"{os.getpid()} {token}"
    with open_log(log_file) as out:
        child = spawn_blocking([sys.executable, "-m", "palestra.engine"], env=environment, output=out)
    return LocalWorker(child.pid, child)


def environment_of(config: WorkerConfig) -> dict[str, str]:
    environment = {"PALESTRA_WORKER": msgspec.json.encode(config).decode()}
    if config.threads:
        environment["OMP_NUM_THREADS"] = str(config.threads)
    return environment


class LocalWorker:
    where = ""

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None = None):
        self.pid, self._child = pid, child

    @property
    def facts(self) -> JsonObject:
        return {"pid": self.pid, "created": psutil.Process(self.pid).create_time()}

    @property
    def returncode(self) -> int | None:
        return None if self._child is None else self._child.returncode

    @property
    def is_running(self) -> bool:
        """Whether a process that was started here has not ended."""
        return self._child is not None and self._child.poll() is None

    async def wait(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            return
        if hasattr(os, "pidfd_open"):
            await _pidfd_exit(self.pid)
        else:  # not on Linux
            with contextlib.suppress(psutil.NoSuchProcess):
                await asyncio.to_thread(psutil.Process(self.pid).wait)
        if self._child is not None:
            self._child.wait()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def leave(self) -> None:
        return

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class LocalHost:
    def __init__(self) -> None:
        self._preloaded: LocalWorker | None = None
        """A process that has loaded the model already, for the first start."""
        self._token = uuid.uuid4().hex

    def preload(self, config: WorkerConfig, log_file: Path) -> None:
        self._preloaded = start_here(config, log_file, token=self._token)

    async def start(self, config: WorkerConfig, log_file: Path) -> LocalWorker:
        preloaded, self._preloaded = self._preloaded, None
        if preloaded is None or not preloaded.is_running:
            return start_here(config, log_file)
        with replacing(Path(config.state) / PRELOAD_GO) as file:
            file.write(f"{self._token} {config.life}".encode())
        return preloaded

    def drop_preloaded(self) -> None:
        preloaded, self._preloaded = self._preloaded, None
        if preloaded is not None:
            preloaded.kill()

    async def find(self, known: JsonObject, log_file: Path) -> LocalWorker | None:
        try:
            process = psutil.Process(known["pid"])
            is_it = abs(process.create_time() - known["created"]) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except (KeyError, psutil.Error):
            return None
        if not is_it:
            return None
        self.drop_preloaded()
        return LocalWorker(process.pid)

    async def wait_until_draining(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        return


async def _pidfd_exit(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
