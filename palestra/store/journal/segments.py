"""The journal's files: format, scanning, writing. One segment is `%012d.journal`.

A header (magic, version), then records: u32 length, u32 crc32 of length and payload, payload; little-endian. The crc
covers the length, so that a tail of zeros, which a power cut may leave, is not read as a series of empty records.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from palestra.store.errors import JournalError
from palestra.util.atomic_files import sync

HEADER = struct.pack("<8sI", b"PALESTRA", 1)
PREFIX_BYTES = 8
_IOV_MAX = 1024  # the largest number of buffers in one writev on Linux
_READ_BYTES = 1 << 20


def segment_path(folder: Path, segment: int) -> Path:
    return folder / f"{segment:012d}.journal"


def find_segments(folder: Path) -> list[int]:
    """Returns the numbers of the segments in a folder, oldest first."""
    return sorted(int(file.stem) for file in folder.glob("*.journal") if file.stem.isdecimal())


def prefix_of(payload: bytes) -> bytes:
    length = len(payload).to_bytes(4, "little")
    return length + zlib.crc32(payload, zlib.crc32(length)).to_bytes(4, "little")


def scan(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yields offset and payload of each record. Raises `JournalError` at the first byte that cannot belong to one."""
    with file.open("rb", buffering=_READ_BYTES) as stream:
        end = os.fstat(stream.fileno()).st_size
        if stream.read(len(HEADER)) != HEADER:
            raise JournalError(f"{file} is damaged at byte 0: not the header of a journal of version 1")
        offset = len(HEADER)
        while offset < end:
            prefix = stream.read(PREFIX_BYTES)
            length = int.from_bytes(prefix[:4], "little")
            whole = len(prefix) == PREFIX_BYTES and offset + PREFIX_BYTES + length <= end
            payload = stream.read(length) if whole else b""
            if not whole or prefix_of(payload) != prefix:
                raise TornRecord(file, offset)
            yield offset, payload
            offset += PREFIX_BYTES + length


class TornRecord(JournalError):
    """The file is not readable from this place on: a crash during the last write, or damage."""

    def __init__(self, file: Path, offset: int) -> None:
        super().__init__(
            f"{file} is damaged at byte {offset}; restore the file, or cut it there to continue without the rest"
        )
        self.offset = offset


def mend_last(file: Path) -> int:
    """Cuts off what a crash left half written at the end of the last segment. Returns the number of bytes cut off."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header = stream.read(len(HEADER))
    if not header.strip(b"\0") or (len(header) < len(HEADER) and HEADER.startswith(header)):
        file.unlink()  # the file was just being created: a header is durable before any record is written
        sync(file.parent)
        return size
    try:
        for _ in scan(file):
            pass
    except TornRecord as e:
        fd = os.open(file, os.O_WRONLY)
        try:
            os.ftruncate(fd, e.offset)
            os.fsync(fd)
        finally:
            os.close(fd)
        return size - e.offset
    return 0


class SegmentWriter:
    """Appends to a new segment, whose header is on disk before anything else. Errors are those of the operating
    system."""

    def __init__(self, folder: Path, segment: int) -> None:
        self.segment = segment
        self.size_bytes = len(HEADER)
        self._has_torn_tail = False
        """Whether a write failed and could not be undone yet."""
        self._fd = os.open(segment_path(folder, segment), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            _write_all(self._fd, [HEADER])
            os.fsync(self._fd)
            sync(folder)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, records: Sequence[bytes]) -> list[int]:
        """Writes records with one write and one fsync, and returns their offsets when they are on disk. After an error
        the file is as before."""
        buffers, offsets, end = [], [], self.size_bytes
        for record in records:
            buffers += [prefix_of(record), record]
            offsets.append(end)
            end += PREFIX_BYTES + len(record)
        if self._has_torn_tail:
            self._cut_tail()
        try:
            _write_all(self._fd, buffers)
            os.fdatasync(self._fd)
        except BaseException:
            self._has_torn_tail = True
            with suppress(OSError):  # if it fails, it is tried again before the next write
                self._cut_tail()
            raise
        self.size_bytes = end
        return offsets

    def _cut_tail(self) -> None:
        os.ftruncate(self._fd, self.size_bytes)
        os.fsync(self._fd)
        self._has_torn_tail = False

    def close(self) -> None:
        os.close(self._fd)


def _write_all(fd: int, buffers: Sequence[bytes]) -> None:
    remaining = iter(buffers)
    while batch := list(islice(remaining, _IOV_MAX)):
        written = os.writev(fd, batch)
        if written < sum(map(len, batch)):  # interrupted by a signal, or the disk is nearly full
            rest = memoryview(b"".join(batch))[written:]
            while rest:
                rest = rest[os.write(fd, rest) :]


def read_record(file: Path, offset: int, size: int) -> bytes:
    try:
        fd = os.open(file, os.O_RDONLY)
    except FileNotFoundError as e:
        raise JournalError(f"{file} was deleted: everything in it was released") from e
    try:
        record = os.pread(fd, PREFIX_BYTES + size, offset)
    finally:
        os.close(fd)
    payload = record[PREFIX_BYTES:]
    if len(payload) != size or prefix_of(payload) != record[:PREFIX_BYTES]:
        raise TornRecord(file, offset)
    return payload
