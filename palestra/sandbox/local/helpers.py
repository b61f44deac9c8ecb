"""Helpers as their owner sees them: forked by one process that stands ready for all of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from palestra.sandbox import lean_python
from palestra.sandbox.errors import SandboxUnavailable
from palestra.sandbox.local.fork_server import NUMBER_BYTES, unpacked
from palestra.util.processes import kill, spawn_blocking

FORK_SERVER = "palestra.sandbox.local.fork_server"
PACKAGES = ("palestra.sandbox.local", "palestra.sandbox")
KILLED = -signal.SIGKILL


class HelperProcess:
    """A helper that runs, or has run."""

    def __init__(self, pid: int, report: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._report = report
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(report, self._read)

    def _read(self) -> None:
        asyncio.get_running_loop().remove_reader(self._report)
        status = os.read(self._report, NUMBER_BYTES)
        os.close(self._report)
        self.returncode = unpacked(status) if status else KILLED  # with the process that had forked it
        self._ended.set()

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def terminate(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)


class ForkServer:
    """The process that forks helpers; started when it is first needed, and again if it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._owner = 0
        self._lock = threading.Lock()  # event loops of several threads ask one server

    def ask(self, name: str, descriptors: Sequence[int]) -> None:
        """Asks for a helper. Raises OSError."""
        with self._lock:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._start()
            assert self._requests is not None
            socket.send_fds(self._requests, [name.encode()], descriptors)

    def _start(self) -> None:
        if self._requests is not None:
            self._requests.close()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = lean_python.command_of(FORK_SERVER, *PACKAGES)
            self._process = spawn_blocking(command, stdin=theirs.fileno(), env={})
        self._owner = os.getpid()


_server = ForkServer()


async def start_helper(
    name: str, order: dict[str, Any], streams: tuple[int, int, int], *more: int
) -> tuple[HelperProcess, socket.socket]:
    """Starts a helper with its standard streams and sends it its order; returns it with our end of its control socket.
    Raises SandboxUnavailable."""
    control, theirs = socket.socketpair()
    report, report_of_helper = os.pipe()
    try:
        try:
            _server.ask(name, [report_of_helper, *streams, theirs.fileno(), *more])
        finally:
            theirs.close()
            os.close(report_of_helper)
        await readable(report)
        if not (number := os.read(report, NUMBER_BYTES)):
            raise OSError("it was killed")
    except OSError as error:
        os.close(report)
        control.close()
        raise SandboxUnavailable(f"the sandbox's helper did not start: {error}") from error
    except BaseException:
        os.close(report)
        control.close()
        raise
    process = HelperProcess(unpacked(number), report)
    control.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_sendall(control, json.dumps(order).encode() + b"\n")
    except OSError:
        pass  # the helper is gone: whoever waits for it sees that
    except BaseException:
        control.close()
        await kill(process)
        raise
    return process, control


async def readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    happened = loop.create_future()
    loop.add_reader(descriptor, lambda: happened.done() or happened.set_result(None))
    try:
        await happened
    finally:
        loop.remove_reader(descriptor)
