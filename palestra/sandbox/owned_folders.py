"""Folders of this process, which another process removes if this one is killed."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from pathlib import Path

from palestra.util.locks import FileLock, Locked

LOCK = "owner.lock"
SANDBOXES = "sandboxes"


def base(kind: str = SANDBOXES) -> Path:
    """Returns where the folders of this user are."""
    return Path(tempfile.gettempdir()) / f"palestra-{kind}-{os.getuid()}"


class OwnedFolder:
    """A folder that is locked by this process for as long as it lives. Raises OSError."""

    def __init__(self, kind: str = SANDBOXES) -> None:
        parent = base(kind)
        parent.mkdir(mode=0o700, exist_ok=True)
        if parent.lstat().st_uid != os.getuid():
            raise PermissionError(f"{parent} belongs to another user")
        self.path = parent / uuid.uuid4().hex
        self.path.mkdir(mode=0o700)
        self._lock = FileLock(self.path / LOCK)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def abandoned(kind: str = SANDBOXES) -> list[Path]:
    """Returns the folders whose owners have ended."""
    return [folder for folder in base(kind).glob("*") if (folder / LOCK).exists() and not _is_held(folder / LOCK)]


def _is_held(lock: Path) -> bool:
    try:
        FileLock(lock).release()
    except Locked:
        return True
    return False
