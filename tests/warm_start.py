"""`palestra` commands and engines in processes that begin as copies of one which has imported what they need.

The imports of a server take 1.5 s of CPU and those of an engine or a trainer 2 s, and the tests start fifty of each.
What runs is the command as a user runs it, in a process of its own that can be killed, stopped and waited for; only its
imports were made before. Servers that are started here start their engines here too, unless there is a GPU, or a test
has changed what an interpreter does when it starts. What clients start (a run's own server) starts as ever.
"""

from __future__ import annotations

import atexit
import fcntl
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
import tempfile
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

COMMANDS = ("palestra.cli.__main__", "palestra.cli.server.serve", "palestra.server.main", "uvloop")
CLIENTS = ("palestra.cli.__main__", "palestra.training.launch", "palestra.cli.train", "palestra.cli.chat.loop")
ENGINES = ("palestra.engine.__main__", "palestra.engine.torch_backend", "palestra.engine.worker")
ENGINE_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
READ_AT_START = ("PYTHONPATH", "TRITON_INTERPRET")
"""Variables that an interpreter and what it imports read once: with other values than ours, an engine starts afresh."""
MESSAGE = 1 << 20


def wait_for_no_disk() -> None:
    """Lets what is written count as on the disk. Tests kill processes, not machines: what these have written stays."""
    os.fsync = os.fdatasync = lambda _: None


class WarmProcess:
    """What of `subprocess.Popen` the tests and the server use."""

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


class ClientProcess(WarmProcess):
    """One whose output is a file without a name."""

    def __init__(self, reports: IO[bytes], output: IO[bytes]) -> None:
        super().__init__(reports)
        self._output = output

    def said(self) -> str:
        """So far."""
        file = self._output.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self.said(), None


class WarmEngines:
    """Starts engines as copies of one process."""

    def __init__(self, parent: socket.socket) -> None:
        self._parent = parent
        self._usual = {name: os.environ.get(name) for name in READ_AT_START} | ENGINE_ENVIRONMENT

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str], output: IO[bytes]
    ) -> WarmProcess | subprocess.Popen[bytes]:
        """As `spawn_blocking([sys.executable, "-m", "palestra.engine"], …)`."""
        is_usual = all(env.get(name) == value for name, value in self._usual.items())
        if is_usual and not Path("/dev/nvidiactl").exists():  # CUDA is never begun in a copy
            return WarmProcess(_request(self._parent, (), [None, output, output], Path.cwd(), env))
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
        )


def start_palestra(*args: str, output: IO[bytes], cwd: Path, env: Mapping[str, str]) -> WarmProcess:
    """As `subprocess.Popen([sys.executable, "-m", "palestra.cli", *args], …)`, without a stdin; for servers."""
    return WarmProcess(_request(_parent_of_commands(), args, [None, output, output], cwd, env))


def start_client(*args: str, cwd: Path) -> ClientProcess:
    """The same for trainers, workers and others that talk to a server."""
    output = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - read as long as the process is known
    return ClientProcess(_request(_parent_of_clients(), args, [None, output, output], cwd, os.environ), output)


def start_in_terminal(*args: str, screen: IO[bytes], env: Mapping[str, str]) -> WarmProcess:
    """The same with a terminal as its own: Ctrl-C in it is the command's signal."""
    return WarmProcess(_request(_parent_of_clients(), args, [screen] * 3, Path.cwd(), env, has_terminal=True))


def start_engine(*, output: IO[bytes], env: Mapping[str, str]) -> WarmProcess | subprocess.Popen[bytes]:
    """As `subprocess.Popen([sys.executable, "-m", "palestra.engine"], …)`, without a stdin and in its own session."""
    return WarmEngines(_parent_of_engines()).start([sys.executable, "-m", "palestra.engine"], output=output, env=env)


def _request(
    parent: socket.socket,
    args: Sequence[str],
    streams: Sequence[IO[bytes] | None],
    cwd: Path,
    env: Mapping[str, str],
    *,
    has_terminal: bool = False,
) -> IO[bytes]:
    """Starts a process with these for its stdin, stdout and stderr. Returns what `WarmProcess` reads."""
    request = {"args": args, "cwd": str(cwd), "env": dict(env), "has_terminal": has_terminal}
    reports, reporting = os.pipe()
    with Path(os.devnull).open("rb") as nothing:
        fds = [(stream or nothing).fileno() for stream in streams]
        socket.send_fds(parent, [json.dumps(request).encode()], [*fds, reporting])
    os.close(reporting)
    return os.fdopen(reports, "rb", buffering=0)


@functools.cache
def _parent_of_commands() -> socket.socket:
    """The parent of all commands that this test process starts; it ends with the test process."""
    engines = _parent_of_engines()
    return _start_parent("commands", str(engines.fileno()), pass_fds=[engines.fileno()])


@functools.cache
def _parent_of_clients() -> socket.socket:
    """The parent of the trainers and chats that this test process starts."""
    return _start_parent("clients")


@functools.cache
def _parent_of_engines() -> socket.socket:
    """The parent of the engines that this test process and its servers start."""
    return _start_parent("engines", env=os.environ | ENGINE_ENVIRONMENT)


def _start_parent(*args: str, env: Mapping[str, str] = os.environ, pass_fds: Sequence[int] = ()) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, __file__, *args], stdin=theirs, env={**env, "PYTHONUNBUFFERED": "1"}, pass_fds=pass_fds
    )
    theirs.close()

    def end() -> None:
        ours.send(b"")  # servers have copies of the socket: to close ours is not the end of the file
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# What follows runs in the parents.


def main() -> None:
    kind, *more = sys.argv[1:]
    wait_for_no_disk()
    given = dict(os.environ)
    for name in {"commands": COMMANDS, "clients": CLIENTS, "engines": ENGINES}[kind]:
        importlib.import_module(name)
    if kind == "commands":
        os.set_inheritable(int(more[0]), False)
        engines = WarmEngines(socket.socket(fileno=int(more[0])))
        sys.modules["palestra.server.core.workers.worker_hosts"].spawn_blocking = engines.start  # type: ignore[attr-defined]
    gc.freeze()
    set_by_imports = {name: value for name, value in os.environ.items() if given.get(name) != value}
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
            for pid in pipes:  # what a test that failed has left
                os.kill(pid, signal.SIGKILL)
            return
        if (pid := os.fork()) == 0:
            requests.close()
            for fd in (woken, wakes, *pipes.values()):
                os.close(fd)
            _become(json.loads(message), fds, set_by_imports)
            sys.exit(_run_engine() if kind == "engines" else sys.modules["palestra.cli.__main__"].run())
        pipes[pid] = fds.pop()
        os.write(pipes[pid], b"%d\n" % pid)
        for fd in fds:
            os.close(fd)


def _run_engine() -> int:
    os.setsid()
    return sys.modules["palestra.engine.__main__"].main()


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


def _become(request: dict[str, Any], fds: list[int], set_by_imports: dict[str, str]) -> None:
    """Makes of a copy of the parent what was asked for."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in enumerate(fds):
        if number < 3:
            os.dup2(fd, number)
        os.close(fd)
    if request["has_terminal"]:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        sys.stdin, sys.stdout, sys.stderr = (open(fd, mode, closefd=False) for fd, mode in enumerate("rww"))  # noqa: SIM115
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(set_by_imports | request["env"])
    sys.path[0] = request["cwd"]  # as with `python -m`
    sys.argv = ["palestra", *request["args"]]


if __name__ == "__main__":
    main()
