"""The journal in files of its own, which are deleted when nothing in them is held.

Owns: group fsync, which records are held, deleting segments. Never touches: what a record means.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from palestra.store.errors import JournalError
from palestra.store.journal import segments as files
from palestra.store.journal.journal import Append, Journal, Position
from palestra.util.atomic_files import sync

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    segment: int
    size_bytes: int
    pending: int
    oldest_held: Position | None


@dataclass(slots=True)
class _Segment:
    size_bytes: int
    pending: dict[int, Position] = field(default_factory=dict)
    """Positions of the records that are still held, by offset and in order."""
    is_pinned: bool = True
    """Whether the segment stays even if nothing in it is held: it is active, or not recovered yet."""


class FileJournal(Journal):
    def __init__(self, folder: Path, segment_bytes: int, patience_s: float) -> None:
        super().__init__(str(folder), patience_s)
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._state = threading.Lock()  # protects _segments: the writer thread adds to it, callers release records
        self._segments: dict[int, _Segment] = {}
        self._recoverable: list[int] = []
        self._next = 1
        self._active: files.SegmentWriter | None = None
        """The segment that is written to; None until something is appended."""

    @classmethod
    def open(cls, folder: Path, *, segment_bytes: int = 64 << 20, patience_s: float = math.inf) -> Self:
        """Opens the journal and cuts off what a crash left half written. No segment is deleted before `recover` has
        passed it. Errors of writes count as lasting when nothing could be written for `patience_s`."""
        journal = cls(folder, segment_bytes, patience_s)
        try:
            journal._look()
        except OSError as e:
            raise JournalError(f"cannot open the journal in {folder}: {e.strerror}") from e
        journal._start_writer()
        return journal

    def _look(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        found = files.find_segments(self.folder)
        if found:
            if cut := files.mend_last(self._path(found[-1])):
                log.warning("cut %d bytes of an unfinished write off %s", cut, self._path(found[-1]))
            found = files.find_segments(self.folder)
        for segment in found:
            self._segments[segment] = _Segment(size_bytes=self._path(segment).stat().st_size)
        self._recoverable = found
        self._next = found[-1] + 1 if found else 1  # existing segments are never appended to

    def recover(self) -> Iterator[tuple[Position, bytes]]:
        """Yields all records once, oldest first. All of them are held afterwards, even those that an earlier process
        had released in files that remained."""
        while self._recoverable:
            number = self._recoverable.pop(0)
            for offset, payload in files.scan(self._path(number)):
                position = Position(number, offset, len(payload))
                with self._state:
                    self._segments[number].pending[offset] = position
                yield position, payload
            with self._state:
                self._segments[number].is_pinned = False
                is_free = not self._segments[number].pending
            if is_free:
                self._sweep_soon()

    def read(self, position: Position) -> bytes:
        return files.read_record(self._path(position.segment), position.offset, position.size)

    def release(self, position: Position) -> None:
        """Releases a record. A segment without held records is deleted."""
        with self._state:
            segment = self._segments.get(position.segment)
            if segment is None:
                return
            segment.pending.pop(position.offset, None)
            is_free = not segment.pending and not segment.is_pinned
        if is_free:
            self._sweep_soon()

    @property
    def size_bytes(self) -> int:
        with self._state:
            return sum(segment.size_bytes for segment in self._segments.values())

    @property
    def file_count(self) -> int:
        return len(self._segments)

    def segments(self) -> list[SegmentInfo]:
        """Returns the segments, oldest first."""
        with self._state:
            return [
                SegmentInfo(
                    number, segment.size_bytes, len(segment.pending), next(iter(segment.pending.values()), None)
                )
                for number, segment in sorted(self._segments.items())
            ]

    # On the writer thread

    def _write(self, appends: list[Append]) -> list[Position]:
        """Writes as many records as go into one segment."""
        active = self._ready()
        batch = appends[: self._count_fitting(appends, active.size_bytes)]
        offsets = active.write([append.record for append in batch])
        positions = [
            Position(active.segment, offset, len(append.record)) for append, offset in zip(batch, offsets, strict=True)
        ]
        with self._state:
            segment = self._segments[active.segment]
            segment.size_bytes = active.size_bytes
            segment.pending.update((position.offset, position) for position in positions)
        return positions

    def _ready(self) -> files.SegmentWriter:
        """Returns the active segment, or a new one if it is full."""
        active = self._active
        if active is not None and active.size_bytes < self._segment_bytes:
            return active
        following = files.SegmentWriter(self.folder, self._next)
        with self._state:
            if active is not None:
                self._segments[active.segment].is_pinned = False
            self._segments[following.segment] = _Segment(size_bytes=following.size_bytes)
        if active is not None:
            active.close()
        self._active = following
        self._next += 1
        return following

    def _count_fitting(self, appends: list[Append], size_bytes: int) -> int:
        """Returns how many records go into a segment of this size, at least one. A segment is full when it has reached
        its size; the last record may go beyond."""
        for count, append in enumerate(appends):
            if count and size_bytes >= self._segment_bytes:
                return count
            size_bytes += files.PREFIX_BYTES + len(append.record)
        return len(appends)

    def _sweep(self) -> None:
        with self._state:
            free = [n for n, segment in self._segments.items() if not segment.pending and not segment.is_pinned]
            for number in free:
                del self._segments[number]
        if not free:
            return
        try:
            for number in free:
                self._path(number).unlink(missing_ok=True)
            sync(self.folder)
        except OSError as e:  # the segment is found at the next start and deleted then
            log.error("cannot delete from the journal: %s", e)

    def _end(self) -> None:
        if self._active is not None:
            self._active.close()

    def _path(self, segment: int) -> Path:
        return files.segment_path(self.folder, segment)
