"""One writer for a run.

Owns: the lock file, telling whether its holder lives. Never touches: the other files of a run.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

import msgspec
import psutil

from palestra.runs.record_files import RunError


class Holder(msgspec.Struct):
    pid: int
    host: str
    started: float
    """When the process did: a number that comes round again is told from it."""

    @classmethod
    def me(cls) -> Holder:
        return cls(os.getpid(), socket.gethostname(), psutil.Process().create_time())

    @property
    def is_alive(self) -> bool:
        """Of another machine's process nobody here can tell: it is taken to be alive."""
        if self.host != socket.gethostname():
            return True
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        except psutil.Error:
            return False


class RunLocked(RunError):
    pass


class RunLock:
    """Held until closed, or until the process ends in whatever way: the kernel lets go, and the next may have it."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            holder = read_holder(file)
            who = f"process {holder.pid} on {holder.host}" if holder else "another process"
            raise RunLocked(
                f"{file.parent} is being written by {who}; wait for it, stop it, or choose another --name"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, msgspec.json.encode(Holder.me()) + b"\n", 0)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1


def read_holder(file: Path) -> Holder | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Holder)
    except (OSError, msgspec.DecodeError):
        return None
