"""`palestra` commands in processes that begin as copies of one which has imported the server.

The imports of a server take 1.5 s of CPU, and the tests start servers fifty times. What runs is the command as a user
runs it, in a process of its own that can be killed, stopped and waited for; only its imports were made before. Engines
are started by their servers, as always.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

IMPORTED = ("palestra.cli.__main__", "palestra.cli.serve", "palestra.server.main", "uvloop")
MESSAGE = 1 << 20


class WarmProcess:
    """What of `subprocess.Popen` the tests use."""

    def __init__(self, reports: IO[bytes]) -> None:
        self._reports = reports
        """The parent writes the number of the process, and later its exit status."""
        self.pid = int(reports.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._reports], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._reports], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"palestra {self.pid}", timeout or 0)
            self.returncode = int(self._reports.readline())
            self._reports.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_palestra(*args: str, output: IO[bytes], cwd: Path, env: Mapping[str, str]) -> WarmProcess:
    """As `subprocess.Popen([sys.executable, "-m", "palestra.cli", *args], …)`, without a stdin."""
    request = json.dumps({"args": args, "cwd": str(cwd), "env": dict(env)}).encode()
    reports, reporting = os.pipe()
    with Path(os.devnull).open("rb") as nothing:
        socket.send_fds(_parent(), [request], [nothing.fileno(), output.fileno(), output.fileno(), reporting])
    os.close(reporting)
    return WarmProcess(os.fdopen(reports, "rb", buffering=0))


@functools.cache
def _parent() -> socket.socket:
    """The parent of all that this test process starts; it ends with the test process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen([sys.executable, __file__], stdin=theirs, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# What follows runs in the parent.


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; this ends with them
    requests, pipes = socket.socket(fileno=os.dup(0)), dict[int, int]()
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, MESSAGE)
            _report_ends(pipes)
        if requests not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(requests, MESSAGE, 4)
        if not message:
            return
        if (pid := os.fork()) == 0:
            requests.close()
            for fd in (woken, wakes, *pipes.values()):
                os.close(fd)
            _become(json.loads(message), fds)
            sys.modules["palestra.cli.__main__"].run()
            return
        pipes[pid] = fds.pop()
        os.write(pipes[pid], b"%d\n" % pid)
        for fd in fds:
            os.close(fd)


def _report_ends(pipes: dict[int, int]) -> None:
    while pipes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        fd = pipes.pop(pid)
        try:
            os.write(fd, b"%d\n" % os.waitstatus_to_exitcode(status))
        except BrokenPipeError:
            pass  # nobody waits for it
        os.close(fd)


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Makes of a copy of the parent what was asked for."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in enumerate(fds):
        if number < 3:
            os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["palestra", *request["args"]]


if __name__ == "__main__":
    main()
