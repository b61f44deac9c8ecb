"""The journal: append-only records that are durable before a request is acknowledged, and are deleted when no request
holds them. `file_journal` keeps them in files, `database_journal` in the database.

Owns: order, groups of records that are written at once, who is informed. Never touches: what a record means, where it
is kept.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from palestra.store.commit_queue import GroupQueue
from palestra.store.errors import JournalError
from palestra.store.write_failures import WriteFailures

log = logging.getLogger(__name__)

MAX_RECORD_BYTES = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Position:
    segment: int
    offset: int
    size: int
    """Size of the record in bytes, without the header that the journal adds."""


@dataclass(frozen=True, slots=True)
class Append:
    """A record that is to be written, and who waits for it."""

    record: bytes
    done: asyncio.Future[Position]


Outcome = tuple[Append, Position | JournalError]
"""The position of an appended record, or the reason why it was not written."""


class _Sweep:
    """Asks the writer thread to delete what is no longer needed."""


class Journal(ABC):
    max_record_bytes = MAX_RECORD_BYTES

    def __init__(self, name: str, patience_s: float) -> None:
        self.name = name
        """What the journal is called in messages."""
        self._failing = WriteFailures(patience_s)
        self._queue: GroupQueue[Append | _Sweep] = GroupQueue()
        self._writer = threading.Thread(target=self._run_writer, name="journal-writer", daemon=True)

    @abstractmethod
    def recover(self) -> Iterator[tuple[Position, bytes]]:
        """Yields all records once, oldest first. All of them are held afterwards."""

    @abstractmethod
    def read(self, position: Position) -> bytes:
        """Reads a record, which blocks for one small read. Raises `JournalError` if it is damaged or was released."""

    @abstractmethod
    def release(self, position: Position) -> None:
        """Releases a record that is no longer needed; releasing it twice does no harm. It is deleted soon."""

    @property
    @abstractmethod
    def size_bytes(self) -> int: ...

    @property
    @abstractmethod
    def file_count(self) -> int:
        """Number of files that the records are in."""

    async def append(self, record: bytes) -> Position:
        """Appends a record, which is durable and held when this returns. If the call is cancelled, the record may be
        in the journal although no request holds it."""
        return await self.append_soon(record)

    def append_soon(self, record: bytes) -> asyncio.Future[Position]:
        """Appends without waiting; records are in the journal in the order of the calls. Needs a running event loop."""
        if len(record) > self.max_record_bytes:
            raise JournalError(f"a record of {len(record)} bytes is larger than a journal can hold")
        done: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        if not self._queue.put(Append(record, done)):
            raise JournalError("the journal is closed")
        return done

    async def close(self) -> None:
        """Closes the journal after everything that is queued has been written."""
        self._queue.close()
        await asyncio.to_thread(self._writer.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    def _start_writer(self) -> None:
        self._writer.start()

    def _sweep_soon(self) -> None:
        self._queue.put(_Sweep())

    # On the writer thread

    @abstractmethod
    def _write(self, appends: list[Append]) -> list[Position]:
        """Writes records from the front of the list, at least one, and returns their positions when they are durable.
        After an error nothing of them is kept."""

    @abstractmethod
    def _sweep(self) -> None:
        """Deletes what is no longer needed. Errors are only logged."""

    @abstractmethod
    def _end(self) -> None:
        """Called once, when nothing will be written any more."""

    def _run_writer(self) -> None:
        while group := self._queue.take():
            appends = [job for job in group if isinstance(job, Append) and not job.done.cancelled()]
            while appends:
                appends = self._write_some(appends)
            self._sweep()
        self._end()

    def _write_some(self, appends: list[Append]) -> list[Append]:
        """Writes as many records as go at once and returns the rest. After an error nothing is left: all are
        refused."""
        try:
            positions = self._write(appends)
        except Exception as e:  # boundary: whatever the error is, callers must not wait for ever
            reason = (e.strerror if isinstance(e, OSError) else None) or str(e) or repr(e)
            error = f"cannot write to the journal in {self.name}: {reason}"
            log.error("%s; %d records refused", error, len(appends))
            is_lasting = self._failing.failed()
            self._tell([(append, _refused(error, is_lasting=is_lasting)) for append in appends])
            return []
        self._failing.worked()
        self._tell(list(zip(appends[: len(positions)], positions, strict=True)))
        return appends[len(positions) :]

    def _tell(self, outcomes: list[Outcome]) -> None:
        """Informs the callers, and wakes up each event loop only once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
        for outcome in outcomes:
            by_loop.setdefault(outcome[0].done.get_loop(), []).append(outcome)
        for loop, of_loop in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._settle, of_loop)
            except RuntimeError:  # the loop is closed: these records will never be released
                for _, outcome in of_loop:
                    self._disown(outcome)

    def _settle(self, outcomes: list[Outcome]) -> None:
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


def _refused(reason: str, *, is_lasting: bool) -> JournalError:
    error = JournalError(reason)
    error.is_lasting = is_lasting
    return error
