"""Folders of this process that others remove when it was killed.

Owns: making them, knowing whose owner lives, removing the rest. Never touches: what is in them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from pathlib import Path

from palestra.util.locks import FileLock, Locked

LOCK = "owner.lock"


def base() -> Path:
    """Returns where the folders of this user are."""
    return Path(tempfile.gettempdir()) / f"palestra-sandboxes-{os.getuid()}"


class OwnedFolder:
    """A folder that is locked by this process for as long as it lives. Raises OSError."""

    def __init__(self) -> None:
        base().mkdir(mode=0o700, exist_ok=True)
        if base().lstat().st_uid != os.getuid():
            raise PermissionError(f"{base()} belongs to somebody else")
        self.path = base() / uuid.uuid4().hex
        self.path.mkdir(mode=0o700)
        self._lock = FileLock(self.path / LOCK)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def abandoned() -> list[Path]:
    """Returns the folders whose owners have ended."""
    return [folder for folder in base().glob("*") if (folder / LOCK).exists() and not _is_held(folder / LOCK)]


def _is_held(lock: Path) -> bool:
    try:
        FileLock(lock).release()
    except Locked:
        return True
    return False
