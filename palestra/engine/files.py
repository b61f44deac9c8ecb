"""Slow file work: one thread that does it in order, and files that are whole or absent, with a checksum over all that
is in them.

Owns: the thread, atomic writing, checksums, file names. Never touches: what is in the files.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from palestra.util.atomic_files import TEMPORARY, sync

BAD = ".bad"
CHECKED = "palestra_checked"  # crc32 as 8 hexadecimal digits, then the metadata
UNCHECKED = "palestra"  # the metadata alone, as files were written before there were checksums
CRC_DIGITS = 8
SNAPSHOT = ".snapshot"
SECOND = "@2"  # in the name of a model's second file; no id has it in its own
MAX_NAME = 200  # of 255 bytes that a file system allows, with room for endings


class FileDamaged(Exception):
    """A file of our own cannot be read back."""


@dataclass(slots=True)
class FileJob:
    work: Callable[[], Any]
    then: Callable[[Any, Exception | None], None]
    value: Any = None
    error: Exception | None = None


class FileThread:
    """`then` runs on the compute thread, when that calls `collect` or `wait`."""

    def __init__(self, wake: Callable[[], None]):
        self._wake = wake
        self._todo: queue.SimpleQueue[FileJob | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[FileJob] = queue.SimpleQueue()
        self.pending = 0
        self._thread = threading.Thread(target=self._run, name="files", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any], then: Callable[[Any, Exception | None], None]) -> None:
        self.pending += 1
        self._todo.put(FileJob(work, then))

    def collect(self) -> None:
        while self.pending:
            try:
                self._end(self._done.get_nowait())
            except queue.Empty:
                return

    def wait(self) -> None:
        """Waits until the oldest job has ended."""
        if self.pending:
            self._end(self._done.get())

    def close(self) -> None:
        while self.pending:
            self.wait()
        self._todo.put(None)
        self._thread.join()

    def _end(self, job: FileJob) -> None:
        self.pending -= 1
        job.then(job.value, job.error)

    def _run(self) -> None:
        while (job := self._todo.get()) is not None:
            try:
                job.value = job.work()
            except Exception as e:
                job.error = e
            self._done.put(job)
            self._wake()


def name_of(identity: str) -> str:
    """An id as a file name, reversible."""
    name = quote(identity, safe="")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"id {identity[:40]!r} has {len(name)} characters as a file name; at most {MAX_NAME}")
    return name


def snapshot_name(model_id: str, number: int) -> str:
    """The file of the first or the second snapshot of a model."""
    return name_of(model_id) + (SECOND if number else "") + SNAPSHOT


def id_of(name: str) -> str:
    return unquote(name)


def name_in_state(file: Path) -> str:
    """Returns the file's name in the worker's state folder: each kind of files has a folder there."""
    return f"{file.parent.name}/{file.name}"


def write_tensors(file: Path, tensors: Mapping[str, NDArray], metadata: str) -> None:
    """Whole and on disk, or absent."""
    temporary = file.with_name(file.name + TEMPORARY)
    try:
        save_file(dict(tensors), temporary, metadata={CHECKED: f"{_checksum(tensors, metadata)}{metadata}"})
        sync(temporary)
        temporary.rename(file)
    except SafetensorError as e:  # its way to say that the disk is full
        raise OSError(f"{file}: {e}") from None
    finally:
        temporary.unlink(missing_ok=True)
    sync(file.parent)


def read_tensors(file: Path) -> tuple[dict[str, NDArray], str]:
    """Returns what was written, to the bit; of a file without checksums, what is there."""
    checksum, metadata, tensors = _read(file, with_tensors=True)
    if checksum and checksum != _checksum(tensors, metadata):
        raise FileDamaged(f"{file}: the content does not match its checksum")
    return tensors, metadata


def read_metadata(file: Path) -> str:
    """Quick, and unchecked: the checksum is over the tensors too."""
    return _read(file, with_tensors=False)[1]


def _read(file: Path, *, with_tensors: bool) -> tuple[str, str, dict[str, NDArray]]:
    """The checksum, empty if there is none; the metadata; the tensors."""
    try:
        with safe_open(file, framework="np") as f:
            found = f.metadata() or {}
            tensors = {name: f.get_tensor(name) for name in f.keys()} if with_tensors else {}  # noqa: SIM118
    except (SafetensorError, OSError) as e:
        raise FileDamaged(f"{file}: cannot be read ({e})") from None
    if UNCHECKED in found:
        return "", found[UNCHECKED], tensors
    if CHECKED not in found:
        raise FileDamaged(f"{file}: not a file of this engine")
    return found[CHECKED][:CRC_DIGITS], found[CHECKED][CRC_DIGITS:], tensors


def _checksum(tensors: Mapping[str, NDArray], metadata: str) -> str:
    """Over all that `read_tensors` returns, whatever the file format does with it."""
    crc = zlib.crc32(metadata.encode())
    for name, array in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
    return f"{crc:0{CRC_DIGITS}x}"


def own_folder(folder: Path) -> Path:
    """Made if needed; what a killed process left half-written goes."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("*" + TEMPORARY):
        left.unlink(missing_ok=True)
    return folder


def set_aside(file: Path) -> None:
    file.rename(file.with_name(file.name + BAD))


def folder_bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.iterdir() if f.is_file())
