"""The helper of one command: it stays outside the sandbox's processes, starts the command inside and ends as that does.

It imports the standard library only. A helper that is ended by a signal did not run its command to the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from types import FrameType
from typing import Any, NoReturn

from palestra.sandbox import seccomp
from palestra.sandbox.local import namespaces as ns
from palestra.sandbox.local.launch import prepare, read_order

SESSION = 3  # place in a process's stat, after its name
CANNOT_START = 126
ROUNDS = 100


def main(control: socket.socket, process: int) -> None:
    """`process` is the pidfd of the sandbox's process 1."""
    try:
        order = read_order(control)
        control.close()
        ns.die_with_parent()
        members = os.open(order["cgroup"], os.O_WRONLY | os.O_CLOEXEC) if order["cgroup"] else None
        prepare(order)
        ns.become(order["user"])
        ns.hide()
        ns.enter(process, ns.ALL)
        os.close(process)
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(readable)
            _command(order, members, writable)
    except BaseException as error:  # boundary: the owner reads why
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        _fail()
    _wait(child, readable, writable)


def _wait(child: int, readable: int, writable: int) -> NoReturn:
    os.close(writable)
    session = os.read(readable, 32)

    def end(_number: int, _frame: FrameType | None) -> None:
        _kill_session(session)
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    devnull = os.open("/dev/null", os.O_RDWR)
    for descriptor in range(3):
        os.dup2(devnull, descriptor)  # the pipes are the command's alone
    _, status = os.waitpid(child, 0)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _command(order: dict[str, Any], members: int | None, writable: int) -> NoReturn:
    """Becomes the command: from here on in the sandbox, without a way back."""
    try:
        ns.die_with_parent()
        os.setsid()
        if members is not None:
            os.write(members, b"0")
        ns.limit(order["limits"])
        ns.drop_capabilities()
        os.write(writable, str(os.getpid()).encode())
        os.closerange(3, 1 << 16)
        os.chdir(order["cwd"])
        if not seccomp.load(bytes.fromhex(order["filter"])):
            raise OSError("the kernel did not take the filter of system calls")
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
        # The shell lies on a read-only mount: a command that names this helper's own program would get at it.
        os.execve("/bin/sh", ["sh", "-c", 'exec "$@"', "sh", *order["arguments"]], order["env"])
    except BaseException as error:  # boundary: nothing may return from here
        os.write(2, f"{error}\n".encode())
    os._exit(CANNOT_START)


def _kill_session(session: bytes) -> None:
    """Kills the command and all that it started, except what has made itself a session of its own."""
    for _ in range(ROUNDS):
        found = [name for name in os.listdir("/proc") if name.isdigit() and _session_of(name) == session]
        if not found:
            return
        for name in found:
            with contextlib.suppress(OSError):
                process = os.open(f"/proc/{name}", os.O_RDONLY | os.O_DIRECTORY)
                signal.pidfd_send_signal(process, signal.SIGKILL)
                os.close(process)


def _session_of(name: str) -> bytes | None:
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else fields[SESSION]


def _fail() -> NoReturn:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGUSR1)
    os._exit(1)
