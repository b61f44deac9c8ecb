"""The journal in the database, so that another machine can go on with it.

Records go through the store's writer, whose connection holds the lock of the database: a server that has lost the lock
can acknowledge nothing.

Owns: the numbers of records, which of them are held. Never touches: what a record means.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator
from typing import Self

from sqlalchemy import Connection, delete, func, insert, select
from sqlalchemy.exc import SQLAlchemyError

from palestra.store.database import Store
from palestra.store.errors import JournalError, StoreError
from palestra.store.journal.journal import Append, Journal, Position
from palestra.store.tables import journal_records as t

log = logging.getLogger(__name__)

GROUP_BYTES = 16 << 20  # of one transaction, and of what is read at once
DELETED_AT_ONCE = 500  # the number of parameters of a statement is limited


class DatabaseJournal(Journal):
    max_record_bytes = 1_000_000_000  # a value of PostgreSQL has less than 1 GiB

    def __init__(self, store: Store, journal: str, patience_s: float) -> None:
        super().__init__("the database", patience_s)
        self._store, self._journal = store, journal
        self._state = threading.Lock()  # protects _held and _released: callers release while the writer thread adds
        self._held: dict[int, int] = {}
        """Sizes of the records that are held, by number."""
        self._released: list[int] = []
        """Numbers of records that are to be deleted."""
        self._recoverable: list[tuple[int, int]] = []
        self._next = 1

    @classmethod
    def open(cls, store: Store, journal: str, *, patience_s: float = math.inf) -> Self:
        """Opens one of the journals of a database. Errors of writes count as lasting when nothing could be written for
        `patience_s`."""
        opened = cls(store, journal, patience_s)
        opened._recoverable = store.read_now(opened._sizes)
        opened._next = max((number for number, _ in opened._recoverable), default=0) + 1
        opened._start_writer()
        return opened

    def recover(self) -> Iterator[tuple[Position, bytes]]:
        while self._recoverable:
            page = self._recoverable[: _count_fitting([size for _, size in self._recoverable])]
            del self._recoverable[: len(page)]
            first, last = page[0][0], page[-1][0]
            for number, record in self._store.read_now(lambda c, first=first, last=last: self._range(c, first, last)):
                with self._state:
                    self._held[number] = len(record)
                yield Position(0, number, len(record)), record

    def read(self, position: Position) -> bytes:
        number = position.offset
        try:
            found = self._store.read_now(lambda c: self._range(c, number, number))
        except (SQLAlchemyError, StoreError) as e:
            raise JournalError(f"record {number} of the journal cannot be read from the database: {e}") from e
        if not found:
            raise JournalError(f"record {number} of the journal was deleted: it was released")
        return found[0][1]

    def release(self, position: Position) -> None:
        with self._state:
            if self._held.pop(position.offset, None) is None:
                return
            self._released.append(position.offset)
        self._sweep_soon()

    @property
    def size_bytes(self) -> int:
        with self._state:
            return sum(self._held.values())

    @property
    def file_count(self) -> int:
        return 0

    # In the database

    def _sizes(self, conn: Connection) -> list[tuple[int, int]]:
        query = select(t.c.number, func.length(t.c.record)).where(t.c.journal == self._journal).order_by(t.c.number)
        return [(number, size) for number, size in conn.execute(query)]

    def _range(self, conn: Connection, first: int, last: int) -> list[tuple[int, bytes]]:
        query = select(t.c.number, t.c.record).where(t.c.journal == self._journal, t.c.number.between(first, last))
        return [(number, record) for number, record in conn.execute(query.order_by(t.c.number))]

    # On the writer thread

    def _write(self, appends: list[Append]) -> list[Position]:
        batch = appends[: _count_fitting([len(append.record) for append in appends])]
        rows = [
            {"journal": self._journal, "number": number, "record": append.record}
            for number, append in enumerate(batch, self._next)
        ]
        self._next += len(rows)
        try:
            self._store.write_now(lambda c: c.execute(insert(t), rows))
        except BaseException:
            with self._state:  # the connection may have broken after the database had committed
                self._released += [row["number"] for row in rows]
            raise
        with self._state:
            self._held.update({row["number"]: len(row["record"]) for row in rows})
        return [Position(0, row["number"], len(row["record"])) for row in rows]

    def _sweep(self) -> None:
        with self._state:
            released, self._released = self._released, []
        for begin in range(0, len(released), DELETED_AT_ONCE):
            numbers = released[begin : begin + DELETED_AT_ONCE]
            try:
                self._store.write_now(lambda c, n=numbers: self._delete(c, n))
            except (SQLAlchemyError, StoreError) as e:
                log.error("cannot delete from the journal; trying again later: %s", e)
                with self._state:
                    self._released += released[begin:]
                return

    def _delete(self, conn: Connection, numbers: list[int]) -> None:
        conn.execute(delete(t).where(t.c.journal == self._journal, t.c.number.in_(numbers)))

    def _end(self) -> None:
        pass


def _count_fitting(sizes: list[int]) -> int:
    """Returns how many records go at once, at least one."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if count and total > GROUP_BYTES:
            return count
    return len(sizes)
