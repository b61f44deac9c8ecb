"""Checkpoint folders as requests name them: the server's. A worker on another machine fetches those that it loads, and
sends those that it saves.

Owns: where they are for this worker. Never touches: what is in them.
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Callable
from glob import escape
from pathlib import Path
from typing import Protocol

from palestra.engine.files import FileThread, folder_bytes, own_folder
from palestra.engine.server_files import FilesUnavailable, ServerFiles
from palestra.engine.uploads import FileUploads, Upload
from palestra.model import AdapterError
from palestra.types.engine import FileArea, WorkerConfig
from palestra.util.atomic_files import TEMPORARY

Write = Callable[[Path], None]
"""Writes a whole folder, atomically."""
Saved = Callable[[int, Exception | None], None]
"""Gets the folder's size."""
MAX_FETCHED = 8  # folders that are kept after they were loaded


class CheckpointFolders(Protocol):
    def find(self, folder: str) -> Path:
        """The folder on this machine."""
        ...

    def saved_bytes(self, folder: Path) -> int | None:
        """Size of a folder that was saved before a restart; None: it is not known to be there."""
        ...

    def save(self, folder: Path, write: Write, then: Saved) -> None: ...


class LocalCheckpoints:
    """The server's folders are here."""

    def __init__(self, files: FileThread):
        self.files = files

    def find(self, folder: str) -> Path:
        return Path(folder)

    def saved_bytes(self, folder: Path) -> int | None:
        return folder_bytes(folder) if folder.exists() else None

    def save(self, folder: Path, write: Write, then: Saved) -> None:
        def work() -> int:
            for left in folder.parent.glob(f".{escape(folder.name)}.*{TEMPORARY}"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            write(folder)
            return folder_bytes(folder)

        self.files.submit(work, then)


class RemoteCheckpoints:
    def __init__(self, config: WorkerConfig, folder: Path, files: FileThread, uploads: FileUploads):
        self._config, self.files, self.uploads = config, files, uploads
        shutil.rmtree(folder, ignore_errors=True)
        self._fetched, self._saving = own_folder(folder / "fetched"), own_folder(folder / "saving")

    def find(self, folder: str) -> Path:
        """Fetches it, if it is not here yet. Folders are never changed, so one that is here is good."""
        here = self._fetched / hashlib.sha256(folder.encode()).hexdigest()
        if here.exists():
            return here
        unfinished = here.with_name(here.name + TEMPORARY)
        files = ServerFiles(self._config)
        try:
            files.fetch(FileArea.CHECKPOINTS, folder, unfinished)
        except FilesUnavailable as e:
            raise AdapterError(str(e)) from None
        finally:
            files.close()
        unfinished.rename(here)
        for old in sorted(self._fetched.iterdir(), key=lambda one: one.stat().st_mtime)[:-MAX_FETCHED]:
            shutil.rmtree(old, ignore_errors=True)
        return here

    def saved_bytes(self, folder: Path) -> int | None:
        return None  # it is written again, to the same bits, and the server keeps what it has

    def save(self, folder: Path, write: Write, then: Saved) -> None:
        here = self._saving / uuid.uuid4().hex

        def work() -> int:
            write(here)
            return folder_bytes(here)

        self.files.submit(work, lambda size, error: self._send(here, folder, size, error, then))

    def _send(self, here: Path, folder: Path, size: int, error: Exception | None, then: Saved) -> None:
        errors: list[Exception] = [] if error is None else [error]

        def end(error: Exception | None) -> None:
            if error is not None:
                errors.append(error)
            self.files.submit(lambda: shutil.rmtree(here, ignore_errors=True), lambda *_: None)
            then(size, errors[0] if errors else None)

        if errors:
            end(None)
            return
        left = sorted(here.iterdir(), reverse=True)

        def send_next(error: Exception | None = None) -> None:
            """The folder gets its name when all of its files are there, and only then."""
            if error is not None:
                end(error)
            elif left:
                file = left.pop()
                self.uploads.add(Upload(FileArea.CHECKPOINTS, str(folder / file.name), send_next, file))
            else:
                self.uploads.add(Upload(FileArea.CHECKPOINTS, str(folder), end))

        send_next()
