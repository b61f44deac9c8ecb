"""One writer for a run."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import psutil

from palestra.runs.record_files import RunError
from palestra.util.locks import FileLock, Locked


class Holder(msgspec.Struct):
    pid: int
    host: str
    started: float
    """Start time of the process: it tells a process from a later one with the same pid."""

    @classmethod
    def me(cls) -> Holder:
        return cls(os.getpid(), socket.gethostname(), psutil.Process().create_time())

    @property
    def is_alive(self) -> bool:
        """Whether the process is alive. A process on another machine cannot be checked and counts as alive."""
        if self.host != socket.gethostname():
            return True
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        except psutil.Error:
            return False


class RunLocked(RunError):
    pass


class RunLock:
    """The lock of a run, held until it is closed or the process ends."""

    def __init__(self, file: Path) -> None:
        try:
            self._lock = FileLock(file, note=msgspec.json.encode(Holder.me()) + b"\n", mode=0o644)
        except Locked:
            holder = read_holder(file)
            who = f"process {holder.pid} on {holder.host}" if holder else "another process"
            raise RunLocked(
                f"{file.parent} is being written by {who}; wait for it, stop it, or choose another --name"
            ) from None

    def close(self) -> None:
        self._lock.release(forget=True)


def read_holder(file: Path) -> Holder | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Holder)
    except (OSError, msgspec.DecodeError):
        return None
