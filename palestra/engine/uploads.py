"""Files on their way to the server: one at a time, part by part, each part after the last was stored.

Owns: the queue, reading, what to do when an answer does not come. Never touches: which files, and when.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import IO, Any

from palestra.engine.files import FileThread
from palestra.types.engine import PART_BYTES, DropFiles, FileArea, FilePart, FileStored, FromWorker, KeepFolder

log = logging.getLogger(__name__)

AGAIN_S = 5.0  # after an error of the server: its disk is full, for example
SEND_AGAIN_S = 30.0  # without an answer: a part or its answer was lost with a connection


@dataclass(frozen=True, slots=True, eq=False)
class Upload:
    area: FileArea
    path: str
    """Path of the file at the server."""
    then: Callable[[Exception | None], None]
    source: Path | None = None
    """None: `path` is a checkpoint's folder whose files were all sent."""
    is_needed: bool = False
    """Whether nothing may be sent before it: where the server cannot store it, it is sent again."""


@dataclass(slots=True, eq=False)
class UploadTry:
    """One try to send a file. Its stream, offset and hash belong to the file thread."""

    upload: Upload
    transfer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    stream: IO[bytes] | None = None
    offset: int = 0
    hash: Any = field(default_factory=hashlib.sha256)
    is_all_sent: bool = False
    sent_at: float = inf
    """When the part was sent whose answer is waited for."""

    def read(self) -> FilePart:
        """The next part. The file may be replaced meanwhile: what was opened stays as it was."""
        assert self.upload.source is not None
        if self.stream is None:
            self.stream = self.upload.source.open("rb")
        data = self.stream.read(PART_BYTES)
        self.hash.update(data)
        is_last = len(data) < PART_BYTES
        if is_last:
            self.stream.close()
        self.offset += len(data)
        return FilePart(
            area=self.upload.area,
            path=self.upload.path,
            offset=self.offset - len(data),
            data=data,
            transfer_id=self.transfer_id,
            digest=self.hash.hexdigest() if is_last else "",
        )

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()


class FileUploads:
    def __init__(self, files: FileThread, send: Callable[[FromWorker], None]):
        self.files, self._send = files, send
        self._waiting: deque[Upload | DropFiles] = deque()
        self._current: UploadTry | None = None

    @property
    def pending(self) -> int:
        return len(self._waiting) + (self._current is not None)

    def add(self, upload: Upload) -> None:
        self._waiting.append(upload)
        self._begin_next()

    def drop(self, paths: list[str]) -> None:
        """Drops copies at the server, after the files before it were sent: they may be what is needed instead."""
        self._waiting.append(DropFiles(paths=paths))
        self._begin_next()

    @property
    def next_s(self) -> float:
        """Returns when `look` has something to do, at the latest."""
        return inf if self._current is None else self._current.sent_at + SEND_AGAIN_S - time.monotonic()

    def look(self) -> None:
        if self.next_s <= 0:
            self.restart()

    def restart(self) -> None:
        """The server is another one, or did not answer: what it has of a file is of no use."""
        if (old := self._current) is not None:
            log.info("upload_begins_again path=%s", old.upload.path)
            self.files.submit(old.close, _ignore)
            self._begin(old.upload)

    def on_stored(self, stored: FileStored) -> None:
        current = self._current
        if current is None or stored.transfer_id != current.transfer_id:
            return
        if stored.error and current.upload.is_needed:
            log.error("upload_failed path=%s error=%s", current.upload.path, stored.error)
            current.sent_at = time.monotonic() + AGAIN_S - SEND_AGAIN_S
        elif stored.error or current.is_all_sent:
            self._end(current, OSError(stored.error) if stored.error else None)
        else:
            self._send_part(current)

    def _begin_next(self) -> None:
        while self._current is None and self._waiting:
            upload = self._waiting.popleft()
            if isinstance(upload, DropFiles):
                self._send(upload)
            else:
                self._begin(upload)

    def _begin(self, upload: Upload) -> None:
        current = self._current = UploadTry(upload)
        if upload.source is not None:
            self._send_part(current)
        else:
            current.is_all_sent, current.sent_at = True, time.monotonic()
            self._send(KeepFolder(transfer_id=current.transfer_id, folder=upload.path))

    def _send_part(self, current: UploadTry) -> None:
        current.sent_at = inf
        self.files.submit(current.read, lambda part, error: self._has_read(current, part, error))

    def _has_read(self, current: UploadTry, part: FilePart | None, error: Exception | None) -> None:
        if current is not self._current:
            return
        if part is None:
            self._end(current, error or OSError(f"{current.upload.source} could not be read"))
            return
        current.is_all_sent, current.sent_at = bool(part.digest), time.monotonic()
        self._send(part)

    def _end(self, current: UploadTry, error: Exception | None) -> None:
        self.files.submit(current.close, _ignore)
        self._current = None
        if error is not None:
            log.error("upload_failed path=%s error=%r", current.upload.path, error)
        current.upload.then(error)
        self._begin_next()


def _ignore(_: None, error: Exception | None) -> None:
    return
