"""Locks between processes: a file that one of them holds, and that the kernel releases when the process ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from palestra.util.atomic_files import naming


class Locked(Exception):
    """Another process holds the lock. `note`: what it wrote into the file."""

    def __init__(self, file: Path, note: bytes):
        super().__init__(f"{file} is locked by another process")
        self.note = note


class FileLock:
    """A lock that is held until `release`, or until the process ends."""

    def __init__(self, file: Path, *, note: bytes = b"", mode: int = 0o600):
        """Takes the lock, or raises Locked at once. `note`: text for others that says who holds it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = os.open(file, os.O_RDWR | os.O_CREAT, mode)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held_by = os.pread(self._descriptor, 4096, 0)
            self.release()
            raise Locked(file, held_by) from None
        except BaseException:
            self.release()
            raise
        os.ftruncate(self._descriptor, 0)
        with naming(file):
            os.pwrite(self._descriptor, note, 0)

    def release(self, *, forget: bool = False) -> None:
        """Releases the lock. `forget`: delete the note too; a killed process leaves it."""
        if self._descriptor is not None:
            if forget:
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
