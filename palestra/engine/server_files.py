"""Files of the server, for a worker on another machine: asked for part by part, checked by digest, resumed where an
earlier process stopped.

Owns: a line of its own to the server, on which nothing else is said. Never touches: what is in the files.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from palestra.engine.server_link import encrypt
from palestra.types.engine import (
    FileArea,
    FileEntry,
    FileListing,
    FilePart,
    FileRequest,
    GetFilePart,
    ListFiles,
    ToWorker,
    WorkerConfig,
    decode_to_worker,
    encode_message,
)
from palestra.util.atomic_files import TEMPORARY, sync

log = logging.getLogger(__name__)

T = TypeVar("T", FileListing, FilePart)

ASK_AGAIN_S = 10.0  # the server may have been restarted
GIVE_UP_S = 1800.0  # the server may have to read 140 GB for their digests
MAX_TRIES = 3


class FilesUnavailable(Exception):
    """The server does not have a file, or cannot be reached."""


class ServerFiles:
    """One thread, one question at a time."""

    def __init__(self, config: WorkerConfig):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        encrypt(self._socket, config.server_key, config.client_key)
        self._socket.connect(config.address)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def entries(self, area: FileArea, folder: str = "") -> list[FileEntry]:
        def is_answer(found: FileListing) -> bool:
            return (found.area, found.folder) == (area, folder)

        listing = self._ask(ListFiles(area=area, folder=folder), FileListing, is_answer)
        if listing.error:
            raise FilesUnavailable(listing.error)
        return listing.files

    def fetch(self, area: FileArea, folder: str, target: Path) -> None:
        """Fetches all files of a folder. What is there already stays; a part of a file is gone on with."""
        for entry in self.entries(area, folder):
            file = target / Path(entry.path).relative_to(folder)
            if not (file.exists() and file.stat().st_size == entry.size_bytes):
                self._fetch(area, entry, file)

    def _fetch(self, area: FileArea, entry: FileEntry, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(file.name + TEMPORARY)
        for _ in range(MAX_TRIES):
            with unfinished.open("ab") as out:
                while (offset := out.tell()) < entry.size_bytes:
                    out.write(self._part(area, entry.path, offset))
            if _digest(unfinished) == entry.digest:
                sync(unfinished)
                unfinished.rename(file)
                sync(file.parent)
                log.info("fetched file=%s bytes=%d", entry.path, entry.size_bytes)
                return
            log.error("fetched_file_differs file=%s", entry.path)
            unfinished.unlink()
        raise FilesUnavailable(f"{entry.path} does not match its digest, {MAX_TRIES} times in a row")

    def _part(self, area: FileArea, path: str, offset: int) -> bytes:
        def is_answer(found: FilePart) -> bool:
            return (found.area, found.path, found.offset) == (area, path, offset)

        part = self._ask(GetFilePart(area=area, path=path, offset=offset), FilePart, is_answer)
        if part.error or not part.data:
            raise FilesUnavailable(part.error or f"{path} has become shorter")
        return part.data

    def _ask(self, request: FileRequest, kind: type[T], is_answer: Callable[[T], bool]) -> T:
        until = time.monotonic() + GIVE_UP_S
        while time.monotonic() < until:
            self._socket.send_multipart([b"", encode_message(request)])
            ask_again_at = time.monotonic() + ASK_AGAIN_S
            while (left_s := ask_again_at - time.monotonic()) > 0:
                if not self._socket.poll(int(left_s * 1000) + 1):
                    break
                found = _decode(self._socket.recv_multipart())
                if isinstance(found, kind) and is_answer(found):
                    return found
        raise FilesUnavailable(f"the server has sent no files for {GIVE_UP_S:g} s")


def _decode(frames: list[bytes]) -> ToWorker | None:
    try:
        return decode_to_worker(frames[-1])
    except msgspec.MsgspecError as e:
        log.error("bad_message error=%r", e)
        return None


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
