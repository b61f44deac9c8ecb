"""Files between the server and a worker on another machine: the base model and checkpoints go there, checkpoints and
copies of the worker's state come from there.

Owns: which files a worker may read and write, writing them whole. Never touches: what is in them.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import structlog

from palestra.types.engine import (
    PART_BYTES,
    DropFiles,
    FileArea,
    FileEntry,
    FileListing,
    FilePart,
    FileRequest,
    FileStored,
    GetFilePart,
    KeepFolder,
    ListFiles,
)
from palestra.util.atomic_files import TEMPORARY, sync

log = structlog.get_logger()

STATE_FILES = ("models/*.snapshot", "samplers/*.sampler")
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Files beside a base model's that are not read here."""


@dataclass(slots=True)
class IncomingFile:
    unfinished: Path
    received: int = 0
    hash: Any = field(default_factory=hashlib.sha256)


class WorkerFiles:
    def __init__(self, state: Path, model: Path, checkpoints: Path):
        """`state` is the worker's folder at the server: a worker on this machine would use it as it is."""
        self._roots = {FileArea.STATE: state, FileArea.MODEL: model, FileArea.CHECKPOINTS: checkpoints}
        self._incoming: dict[str, IncomingFile] = {}
        self._listings: dict[ListFiles, asyncio.Task[FileListing]] = {}
        self._digests: dict[tuple[Path, int, int], str] = {}
        """By path, size and time of the last change."""

    def forget_incoming(self) -> None:
        """The worker is another one: what was half sent is of no use."""
        for incoming in self._incoming.values():
            incoming.unfinished.unlink(missing_ok=True)
        self._incoming.clear()

    # To the worker

    async def answer(self, request: FileRequest) -> FileListing | FilePart:
        if isinstance(request, GetFilePart):
            return await asyncio.to_thread(self._part, request)
        if request not in self._listings:  # a worker asks again when it waits for long
            task = self._listings[request] = asyncio.create_task(asyncio.to_thread(self._listing, request))
            task.add_done_callback(lambda _: self._listings.pop(request, None))
        return await asyncio.shield(self._listings[request])

    def _listing(self, request: ListFiles) -> FileListing:
        try:
            files = [self._entry(request.area, file) for file in self._files(request)]
        except (OSError, ValueError) as e:
            return FileListing(area=request.area, folder=request.folder, files=[], error=str(e))
        return FileListing(area=request.area, folder=request.folder, files=files)

    def _files(self, request: ListFiles) -> list[Path]:
        root = self._roots[request.area]
        if request.area is FileArea.STATE:
            return sorted(
                file for pattern in STATE_FILES if pattern.startswith(request.folder) for file in root.glob(pattern)
            )
        folder = self._resolve(request.area, request.folder)
        if not folder.is_dir():
            raise ValueError(f"{folder} no longer exists")
        unread = OTHER_WEIGHTS if request.area is FileArea.MODEL else ()
        return sorted(
            file
            for file in folder.iterdir()
            if file.is_file() and file.suffix not in unread and not file.name.startswith(".")
        )

    def _entry(self, area: FileArea, file: Path) -> FileEntry:
        status = file.stat()
        key = file, status.st_size, status.st_mtime_ns
        if key not in self._digests:
            with file.open("rb") as stream:
                self._digests[key] = hashlib.file_digest(stream, "sha256").hexdigest()
        path = str(file) if area is FileArea.CHECKPOINTS else str(file.relative_to(self._roots[area]))
        return FileEntry(path, status.st_size, self._digests[key])

    def _part(self, request: GetFilePart) -> FilePart:
        data, error = b"", ""
        try:
            with self._resolve(request.area, request.path).open("rb") as stream:
                stream.seek(request.offset)
                data = stream.read(PART_BYTES)
        except (OSError, ValueError) as e:
            error = str(e)
        return FilePart(area=request.area, path=request.path, offset=request.offset, data=data, error=error)

    def _resolve(self, area: FileArea, path: str) -> Path:
        """Raises ValueError for a path outside of its area."""
        root = self._roots[area]
        relative = PurePosixPath(path)
        if relative.is_absolute():
            relative = relative.relative_to(root)
        if ".." in relative.parts:
            raise ValueError(f"{path} is not a file of a worker")
        return root / relative

    # From the worker

    def _resolve_sent(self, area: FileArea, path: str) -> Path:
        """Raises ValueError for a path that is none of a snapshot, a sampler or a checkpoint's file."""
        file = self._resolve(area, path)
        relative = file.relative_to(self._roots[area])
        is_state = len(relative.parts) == 2 and any(relative.match(pattern) for pattern in STATE_FILES)
        if not (is_state if area is FileArea.STATE else len(relative.parts) > 1):
            raise ValueError(f"{path} is not a file that a worker sends")
        return file

    async def store(self, part: FilePart) -> FileStored:
        """Stores a part; after the last one the file is on disk, whole, under its name."""
        try:
            await asyncio.to_thread(self._store, part)
        except (OSError, ValueError) as e:
            log.error("a worker's file could not be stored", path=part.path, error=str(e))
            if (incoming := self._incoming.pop(part.transfer_id, None)) is not None:
                incoming.unfinished.unlink(missing_ok=True)
            return FileStored(transfer_id=part.transfer_id, error=str(e))
        return FileStored(transfer_id=part.transfer_id)

    def _store(self, part: FilePart) -> None:
        if part.area is FileArea.MODEL:
            raise ValueError("the base model is never changed")
        file = self._resolve_sent(part.area, part.path)
        if part.area is FileArea.CHECKPOINTS:
            file = _unfinished(file.parent) / file.name
        incoming = self._incoming.get(part.transfer_id)
        if incoming is None:
            unfinished = file.with_name(f"{file.name}.{part.transfer_id}{TEMPORARY}")
            incoming = self._incoming[part.transfer_id] = IncomingFile(unfinished)
            file.parent.mkdir(parents=True, exist_ok=True)
        if part.offset != incoming.received:
            raise ValueError(f"{part.path}: byte {incoming.received} was expected, not {part.offset}")
        with incoming.unfinished.open("ab") as out:
            out.write(part.data)
            out.flush()
            os.fdatasync(out.fileno())  # part by part: at the end, a large file would take longer than its worker waits
        incoming.hash.update(part.data)
        incoming.received += len(part.data)
        if part.digest:
            del self._incoming[part.transfer_id]
            if incoming.hash.hexdigest() != part.digest:
                incoming.unfinished.unlink()
                raise ValueError(f"{part.path} does not match its digest")
            sync(incoming.unfinished)
            incoming.unfinished.replace(file)
            sync(file.parent)

    async def keep(self, request: KeepFolder) -> FileStored:
        """A checkpoint takes its name; one that has it already stays, since it has the same weights."""
        try:
            await asyncio.to_thread(self._keep, self._resolve(FileArea.CHECKPOINTS, request.folder))
        except (OSError, ValueError) as e:
            return FileStored(transfer_id=request.transfer_id, error=str(e))
        return FileStored(transfer_id=request.transfer_id)

    def _keep(self, folder: Path) -> None:
        unfinished = _unfinished(folder)
        if folder.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
            return
        unfinished.rename(folder)
        sync(folder.parent)

    async def drop(self, request: DropFiles) -> None:
        for path in request.paths:
            await asyncio.to_thread(self._resolve_sent(FileArea.STATE, path).unlink, missing_ok=True)


def _unfinished(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.sent{TEMPORARY}")
