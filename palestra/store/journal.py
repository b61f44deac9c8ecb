"""The journal: append-only records that are on disk before anyone is told, and go when nobody holds them.

Owns: order, group fsync, what is held, deleting segments. Never touches: what a record means.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from palestra.store import segments
from palestra.store.errors import JournalError
from palestra.store.groups import GroupQueue

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    segment: int
    offset: int
    size: int
    """Of the record, without what the journal adds."""


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    segment: int
    size_bytes: int
    held: int
    oldest_held: Position | None


@dataclass(slots=True)
class _Segment:
    size_bytes: int
    held: dict[int, Position] = field(default_factory=dict)
    """By offset, in order."""
    is_pinned: bool = True
    """Active, or not recovered yet: stays even if nothing is held."""


@dataclass(frozen=True, slots=True)
class _Append:
    record: bytes
    done: asyncio.Future[Position]


class _Sweep:
    """Asks the writer thread to delete what nobody needs."""


class Journal:
    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._state = threading.Lock()  # protects _segments: the writer adds, callers release
        self._segments: dict[int, _Segment] = {}
        self._recoverable: list[int] = []
        self._active = 0
        self._fd: int | None = None
        """Of the active segment; None until something is appended."""
        self._has_torn_tail = False
        """A write failed and could not be undone yet."""
        self._queue: GroupQueue[_Append | _Sweep] = GroupQueue()
        self._writer = threading.Thread(target=self._run_writer, name="journal-writer", daemon=True)

    @classmethod
    def open(cls, folder: Path, *, segment_bytes: int = 64 << 20) -> Self:
        """Cuts off what a crash left half written. Nothing found is deleted before `recover` has passed it."""
        journal = cls(folder, segment_bytes)
        try:
            journal._look()
        except OSError as e:
            raise JournalError(f"cannot open the journal in {folder}: {e.strerror}") from e
        journal._writer.start()
        return journal

    def _look(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        found = segments.find_segments(self.folder)
        if found and (cut := segments.mend_last(self._path(found[-1]))):
            log.warning("cut %d bytes of an unfinished write off %s", cut, self._path(found[-1]))
            found = segments.find_segments(self.folder)
        for segment in found:
            self._segments[segment] = _Segment(size_bytes=self._path(segment).stat().st_size)
        self._recoverable = found
        # What was there stays as it is; the next append starts a segment.
        self._active = found[-1] if found else 0

    def recover(self) -> Iterator[tuple[Position, bytes]]:
        """Once, oldest first. All of it is held then, also what an earlier life had released in files that remained."""
        while self._recoverable:
            number = self._recoverable.pop(0)
            for offset, payload in segments.scan(self._path(number)):
                position = Position(number, offset, len(payload))
                with self._state:
                    self._segments[number].held[offset] = position
                yield position, payload
            with self._state:
                self._segments[number].is_pinned = False
                is_free = not self._segments[number].held
            if is_free:
                self._queue.put(_Sweep())

    async def append(self, record: bytes) -> Position:
        """On disk and held when it returns. Cancelled meanwhile, it may be in the file, held by nobody."""
        return await self.append_soon(record)

    def append_soon(self, record: bytes) -> asyncio.Future[Position]:
        """The same without waiting: order in the file is order of the calls. Needs a running loop."""
        if len(record) > segments.MAX_RECORD_BYTES:
            raise JournalError(f"a record of {len(record)} bytes is more than a journal can hold")
        done: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        if not self._queue.put(_Append(record, done)):
            raise JournalError("the journal is closed")
        return done

    def read(self, position: Position) -> bytes:
        """Blocks for one small read. `JournalError` when it is damaged or was released."""
        return segments.read_record(self._path(position.segment), position.offset, position.size)

    def release(self, position: Position) -> None:
        """No longer needed; saying so twice does no harm. A segment without held entries is deleted."""
        with self._state:
            segment = self._segments.get(position.segment)
            if segment is None:
                return
            segment.held.pop(position.offset, None)
            is_free = not segment.held and not segment.is_pinned
        if is_free:
            self._queue.put(_Sweep())

    @property
    def size_bytes(self) -> int:
        with self._state:
            return sum(segment.size_bytes for segment in self._segments.values())

    def segments(self) -> list[SegmentInfo]:
        """Oldest first."""
        with self._state:
            return [
                SegmentInfo(number, segment.size_bytes, len(segment.held), next(iter(segment.held.values()), None))
                for number, segment in sorted(self._segments.items())
            ]

    async def close(self) -> None:
        """After everything queued is written."""
        self._queue.close()
        await asyncio.to_thread(self._writer.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    # The writer thread

    def _run_writer(self) -> None:
        while group := self._queue.take():
            appends = [item for item in group if isinstance(item, _Append)]
            if appends:
                self._write_group(appends)
            self._sweep()
        if self._fd is not None:
            os.close(self._fd)

    def _write_group(self, appends: list[_Append]) -> None:
        """One write and one fsync for all; all of them fail together, and the file is as before."""
        try:
            positions = self._write(appends)
        except OSError as e:
            error = JournalError(f"cannot write to the journal in {self.folder}: {e.strerror or e}")
            for append in appends:
                _resolve(append.done, error)
            return
        for append, position in zip(appends, positions, strict=True):
            _resolve(append.done, position)

    def _write(self, appends: list[_Append]) -> list[Position]:
        fd = self._open_segment()
        with self._state:
            start = self._segments[self._active].size_bytes
        buffers, positions, offset = [], [], start
        for append in appends:
            buffers += [segments.prefix_of(append.record), append.record]
            positions.append(Position(self._active, offset, len(append.record)))
            offset += segments.PREFIX_BYTES + len(append.record)
        self._has_torn_tail = True
        try:
            segments.write_all(fd, buffers)
            os.fdatasync(fd)
        except OSError:
            self._cut_tail(fd, start)
            raise
        self._has_torn_tail = False
        with self._state:
            segment = self._segments[self._active]
            segment.size_bytes = offset
            segment.held.update((p.offset, p) for p in positions)
        return positions

    def _open_segment(self) -> int:
        """The active segment's descriptor; a new segment when it is full or cannot be used."""
        if self._fd is not None:
            with self._state:
                size = self._segments[self._active].size_bytes
            if self._has_torn_tail:
                self._cut_tail(self._fd, size)
            if size < self._segment_bytes and not self._has_torn_tail:
                return self._fd
        fd = segments.create(self._path(self._active + 1))
        if self._fd is not None:
            os.close(self._fd)
        with self._state:
            if self._active in self._segments and self._active not in self._recoverable:
                self._segments[self._active].is_pinned = False
            self._active += 1
            self._segments[self._active] = _Segment(size_bytes=len(segments.HEADER))
        self._fd, self._has_torn_tail = fd, False
        return fd

    def _cut_tail(self, fd: int, size: int) -> None:
        try:
            os.ftruncate(fd, size)
            os.fdatasync(fd)
        except OSError as e:
            log.error("cannot cut an unfinished write off %s: %s", self._path(self._active), e)
        else:
            self._has_torn_tail = False

    def _sweep(self) -> None:
        with self._state:
            free = [n for n, s in self._segments.items() if not s.held and not s.is_pinned]
        for number in free:
            try:
                self._path(number).unlink(missing_ok=True)
                segments.sync_folder(self.folder)
            except OSError as e:
                log.error("cannot delete %s: %s", self._path(number), e)
                continue
            with self._state:
                del self._segments[number]

    def _path(self, segment: int) -> Path:
        return segments.segment_path(self.folder, segment)


def _resolve(done: asyncio.Future[Position], outcome: Position | JournalError) -> None:
    def settle() -> None:
        if done.done():
            return  # the caller has gone
        if isinstance(outcome, Position):
            done.set_result(outcome)
        else:
            done.set_exception(outcome)

    try:
        done.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:  # the loop is closed: nobody waits any more
        pass
