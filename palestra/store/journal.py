"""The journal: append-only records that are on disk before a request is acknowledged, and are deleted when nobody holds
them.

Owns: order, group fsync, which records are held, deleting segments. Never touches: what a record means.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from palestra.store import journal_files as files
from palestra.store.commit_queue import GroupQueue
from palestra.store.errors import JournalError
from palestra.store.write_failures import WriteFailures
from palestra.util.files import sync

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    segment: int
    offset: int
    size: int
    """Size of the record in bytes, without the header that the journal adds."""


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


@dataclass(frozen=True, slots=True)
class _Append:
    record: bytes
    done: asyncio.Future[Position]


_Outcome = tuple[_Append, Position | JournalError]
"""The position of an appended record, or the reason why it was not written."""


class _Sweep:
    """Asks the writer thread to delete segments that nobody needs."""


class Journal:
    def __init__(self, folder: Path, segment_bytes: int, patience_s: float) -> None:
        self.folder = folder
        self._segment_bytes, self._failing = segment_bytes, WriteFailures(patience_s)
        self._state = threading.Lock()  # protects _segments: the writer thread adds to it, callers release records
        self._segments: dict[int, _Segment] = {}
        self._recoverable: list[int] = []
        self._next = 1
        self._active: files.SegmentWriter | None = None
        """The segment that is written to; None until something is appended."""
        self._queue: GroupQueue[_Append | _Sweep] = GroupQueue()
        self._writer = threading.Thread(target=self._run_writer, name="journal-writer", daemon=True)

    @classmethod
    def open(cls, folder: Path, *, segment_bytes: int = 64 << 20, patience_s: float = math.inf) -> Self:
        """Opens the journal and cuts off what a crash left half written. No segment is deleted before `recover` has
        passed it. Errors of writes count as lasting when nothing could be written for `patience_s`."""
        journal = cls(folder, segment_bytes, patience_s)
        try:
            journal._look()
        except OSError as e:
            raise JournalError(f"cannot open the journal in {folder}: {e.strerror}") from e
        journal._writer.start()
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
                self._queue.put(_Sweep())

    async def append(self, record: bytes) -> Position:
        """Appends a record, which is on disk and held when this returns. If the call is cancelled, the record may be in
        the file although nobody holds it."""
        return await self.append_soon(record)

    def append_soon(self, record: bytes) -> asyncio.Future[Position]:
        """Appends without waiting; records are in the file in the order of the calls. Needs a running event loop."""
        if len(record) > files.MAX_RECORD_BYTES:
            raise JournalError(f"a record of {len(record)} bytes is larger than a journal can hold")
        done: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        if not self._queue.put(_Append(record, done)):
            raise JournalError("the journal is closed")
        return done

    def read(self, position: Position) -> bytes:
        """Reads a record, which blocks for one small read. Raises `JournalError` if it is damaged or was released."""
        return files.read_record(self._path(position.segment), position.offset, position.size)

    def release(self, position: Position) -> None:
        """Releases a record that is no longer needed; releasing it twice does no harm. A segment without held records
        is deleted."""
        with self._state:
            segment = self._segments.get(position.segment)
            if segment is None:
                return
            segment.pending.pop(position.offset, None)
            is_free = not segment.pending and not segment.is_pinned
        if is_free:
            self._queue.put(_Sweep())

    @property
    def size_bytes(self) -> int:
        with self._state:
            return sum(segment.size_bytes for segment in self._segments.values())

    def segments(self) -> list[SegmentInfo]:
        """Returns the segments, oldest first."""
        with self._state:
            return [
                SegmentInfo(
                    number, segment.size_bytes, len(segment.pending), next(iter(segment.pending.values()), None)
                )
                for number, segment in sorted(self._segments.items())
            ]

    async def close(self) -> None:
        """Closes the journal after everything that is queued has been written."""
        self._queue.close()
        await asyncio.to_thread(self._writer.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    # On the writer thread

    def _run_writer(self) -> None:
        while group := self._queue.take():
            appends = [job for job in group if isinstance(job, _Append) and not job.done.cancelled()]
            while appends:
                appends = self._write_some(appends)
            self._sweep()
        if self._active is not None:
            self._active.close()

    def _write_some(self, appends: list[_Append]) -> list[_Append]:
        """Writes as many records as go into one segment and returns the rest. After an error nothing is left: all are
        refused."""
        try:
            active = self._ready()
            batch = appends[: self._count_fitting(appends, active.size_bytes)]
            positions = self._write(active, batch)
        except Exception as e:  # boundary: whatever the error is, callers must not wait for ever
            reason = e.strerror if isinstance(e, OSError) else repr(e)
            error = f"cannot write to the journal in {self.folder}: {reason}"
            log.error("%s; %d records refused", error, len(appends))
            is_lasting = self._failing.failed()
            self._tell([(append, _refused(error, is_lasting=is_lasting)) for append in appends])
            return []
        self._failing.worked()
        self._tell(list(zip(batch, positions, strict=True)))
        return appends[len(batch) :]

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

    def _count_fitting(self, appends: list[_Append], size_bytes: int) -> int:
        """Returns how many records go into a segment of this size, at least one. A segment is full when it has reached
        its size; the last record may go beyond."""
        for count, append in enumerate(appends):
            if count and size_bytes >= self._segment_bytes:
                return count
            size_bytes += files.PREFIX_BYTES + len(append.record)
        return len(appends)

    def _write(self, active: files.SegmentWriter, batch: list[_Append]) -> list[Position]:
        offsets = active.write([append.record for append in batch])
        positions = [
            Position(active.segment, offset, len(append.record)) for append, offset in zip(batch, offsets, strict=True)
        ]
        with self._state:
            segment = self._segments[active.segment]
            segment.size_bytes = active.size_bytes
            segment.pending.update((position.offset, position) for position in positions)
        return positions

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

    def _tell(self, outcomes: list[_Outcome]) -> None:
        """Informs the callers, and wakes up each event loop only once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
        for outcome in outcomes:
            by_loop.setdefault(outcome[0].done.get_loop(), []).append(outcome)
        for loop, of_loop in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._settle, of_loop)
            except RuntimeError:  # the loop is closed: nobody will ever release these records
                for _, outcome in of_loop:
                    self._disown(outcome)

    def _settle(self, outcomes: list[_Outcome]) -> None:
        """Sets the results of the futures. Runs on the event loop of the callers."""
        for append, outcome in outcomes:
            if append.done.cancelled():
                self._disown(outcome)
            elif isinstance(outcome, Position):
                append.done.set_result(outcome)
            else:
                append.done.set_exception(outcome)

    def _disown(self, outcome: Position | JournalError) -> None:
        if isinstance(outcome, Position):
            self.release(outcome)

    def _path(self, segment: int) -> Path:
        return files.segment_path(self.folder, segment)


def _refused(reason: str, *, is_lasting: bool) -> JournalError:
    error = JournalError(reason)
    error.is_lasting = is_lasting
    return error
