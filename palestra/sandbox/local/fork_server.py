"""The process from which helpers are forked: a Python that has loaded them already, so that none has to start anew.

It imports the standard library only. A message on its standard input, a socket, asks for a helper: its name, and the
descriptors that it gets. It ends with its owner.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import sys

from palestra.sandbox.local import enter, launch

HELPERS = {"launch": launch.main, "enter": enter.main}
MAX_DESCRIPTORS = 6
"""Where the helper reports its number and this process its status; input, output and errors of the helper; its control
socket; and what else it gets."""
FIRST = 3
"""The number of the control socket in a helper; the next one is what else it gets."""
ABOVE = 64
NUMBER_BYTES = 4
"""A report has two numbers of this size: the helper's own, and the status it ended with."""


def main() -> None:
    requests = socket.socket(fileno=os.dup(0))
    events = select.poll()
    events.register(requests, select.POLLIN)
    events.register(owner := os.pidfd_open(os.getppid()), select.POLLIN)
    running: dict[int, tuple[int, int]] = {}  # by pidfd: the helper, and where to tell its end
    while True:
        for descriptor, _ in events.poll():
            if descriptor == owner:
                os._exit(0)
            elif descriptor == requests.fileno():
                name, found, _, _ = socket.recv_fds(requests, 64, MAX_DESCRIPTORS)
                if not name:
                    os._exit(0)
                pid = _fork(name.decode(), found)
                running[pidfd := os.pidfd_open(pid)] = pid, found[0]
                events.register(pidfd, select.POLLIN)
            else:
                events.unregister(descriptor)
                os.close(descriptor)
                _tell_end(*running.pop(descriptor))


def _fork(name: str, descriptors: list[int]) -> int:
    """Returns the helper's number. It has a session of its own when its owner hears of it."""
    report, *others = descriptors
    if pid := os.fork():
        for one in others:
            os.close(one)
        return pid
    try:
        os.setsid()
        os.write(report, packed(os.getpid()))
        _keep_only(others)
        HELPERS[name](socket.socket(fileno=FIRST), FIRST + 1)
    except BaseException as error:  # boundary: nothing may return into the loop of the server
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
    os._exit(1)


def _keep_only(descriptors: list[int]) -> None:
    """Gives these the numbers from 0 on, and closes all others."""
    above = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, ABOVE) for one in descriptors]  # clear of the lowest numbers
    for number, one in enumerate(above):
        os.dup2(one, number, inheritable=number < FIRST)
    os.closerange(len(above), 1 << 16)


def _tell_end(pid: int, report: int) -> None:
    _, status = os.waitpid(pid, 0)
    try:
        os.write(report, packed(os.waitstatus_to_exitcode(status)))
    except OSError:
        pass  # the owner does not wait for it any more
    os.close(report)


def packed(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "little", signed=True)


def unpacked(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)
