"""Usage that is not in the database yet: one file of lines, to which every use is appended before its client learns of
the result.

There is no sync: after a kill of the process the file is exact, after a power cut it may lack the last moments. The
database says how much of the file it contains, for each of the servers that take turns with it. The first line names
the log, and its present life. Owns: the file. Never touches: the database, what is counted.
"""

from __future__ import annotations

import logging
import os
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from palestra.store.records import UsageCounts, UsageKey
from palestra.util.atomic_files import replacing

log = logging.getLogger(__name__)

MAX_BYTES = 8 << 20  # of lines that the database contains, before they are deleted


class UsageEntry(msgspec.Struct, frozen=True):
    key: UsageKey
    counts: UsageCounts
    model_id: str = ""
    seq_id: int = -1
    """Number of a training request, which must not be counted twice."""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(UsageEntry).decode


class UsageLog:
    def __init__(self, file: Path):
        self.file = file
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            data = b""
        self.name, _, self._life = data.partition(b"\n")[0].decode(errors="replace").partition(" ")
        self._end, self._fd = len(data), -1
        if not data:
            self.name = secrets.token_hex(8)
            self._start(b"")
            return
        self._open()
        if not data.endswith(b"\n"):  # its last line was cut off
            self._end += os.write(self._fd, b"\n")

    @property
    def position(self) -> str:
        """Says which lines there are: the name of the file's present life, and its length."""
        return f"{self._life} {self._end}"

    def after(self, position: str | None) -> Iterator[UsageEntry]:
        """Yields entries that came after a position."""
        life, _, offset = (position or "").partition(" ")
        data = self.file.read_bytes()
        begin = int(offset) if life == self._life else data.index(b"\n") + 1
        for line in data[begin:].splitlines():
            crc, _, content = line.partition(b" ")
            try:
                if crc == b"%08x" % zlib.crc32(content):
                    yield _decode(content)
            except msgspec.MsgspecError:  # of another version
                log.warning("a line of %s cannot be read", self.file)

    def append(self, entry: UsageEntry) -> None:
        content = _encode(entry)
        line = b"%08x %s\n" % (zlib.crc32(content), content)
        try:
            self._end += os.write(self._fd, line)
        except OSError as e:  # it is in memory all the same, and soon in the database
            log.error("cannot write to %s: %s", self.file, e.strerror)

    def forget(self, position: str) -> None:
        """Deletes lines up to a position, when they are many."""
        life, _, offset = position.partition(" ")
        if life == self._life and int(offset) > MAX_BYTES:
            self._start(self.file.read_bytes()[int(offset) :])

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _start(self, lines: bytes) -> None:
        """Starts a new life of the file, with these lines after the first."""
        life = secrets.token_hex(8)
        lines = f"{self.name} {life}\n".encode() + lines
        with replacing(self.file, mode=0o600) as stream:
            stream.write(lines)
        self._life, self._end = life, len(lines)
        self._open()

    def _open(self) -> None:
        self.close()
        self._fd = os.open(self.file, os.O_WRONLY | os.O_APPEND)
