"""The database, used from threads: one writer that commits in groups, a few readers.

Owns: transactions, the writer thread, opening and closing. Never touches: what is in the tables.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar

from sqlalchemy import Connection, RootTransaction
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from palestra.store import schema
from palestra.store.commit_queue import GroupQueue
from palestra.store.dialects import READERS, Database, database_of
from palestra.store.errors import StoreError
from palestra.store.write_failures import WriteFailures

T = TypeVar("T")

log = logging.getLogger(__name__)

CLOSED = "the store is closed"


@dataclass(slots=True)
class WriteOutcome(Generic[T]):
    result: T | None = None
    error: BaseException | None = None


@dataclass(slots=True)
class _Job(Generic[T]):
    work: Callable[[Connection], T]
    tell: Callable[[WriteOutcome[T]], None]
    loop: asyncio.AbstractEventLoop | None
    """Where it is told. None: on the writer's thread."""
    is_given_up: Callable[[], bool] | None = None


class Store:
    """`async with Store.open(url) as store`, or `with` where there is no loop."""

    def __init__(self, database: Database, *, lock: bool, patience_s: float) -> None:
        self._database = database
        self._failing = WriteFailures(patience_s)
        self._lock = lock
        self._writes = database.writer()
        self._reads = database.readers()
        self._conn: Connection | None = None
        """The writer thread's, once it runs."""
        self._queue: GroupQueue[_Job[Any]] = GroupQueue()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-reader")
        self._writer = threading.Thread(target=self._run_writer, name="store-writer", daemon=True)

    @classmethod
    def open(cls, url: str, *, lock: bool = True, patience_s: float = math.inf) -> Self:
        """Creates folders and file, migrates, and takes the lock. Without `lock` it works beside a running server.
        `patience_s`: errors of writes are lasting when nothing could be written for so long."""
        store = cls(database_of(url), lock=lock, patience_s=patience_s)
        try:
            store._conn = store._connect()
        except BaseException as e:
            store._database.release()
            if not isinstance(e, SQLAlchemyError):
                raise
            raise StoreError(f"cannot open the database {store._database.url!r}: {_reason(e)}") from e
        store._writer.start()
        return store

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Durable when it returns. Of a failing `work` nothing is kept, and its error is raised here."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._submit(_Job(work, partial(_settle, done), loop, done.cancelled))
        return await done

    def write_now(self, work: Callable[[Connection], T]) -> T:
        done: Future[T] = Future()
        self._submit(_Job(work, partial(_settle, done), None))
        return done.result()

    async def read(self, work: Callable[[Connection], T]) -> T:
        """One consistent view, not held up by writes."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self.read_now, work)

    def read_now(self, work: Callable[[Connection], T]) -> T:
        with self._reads.connect() as conn:
            return work(conn)

    async def close(self) -> None:
        """After everything queued is written."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        self._queue.close()
        self._writer.join()
        self._readers.shutdown()
        self._reads.dispose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close_now()

    def _submit(self, job: _Job[Any]) -> None:
        if not self._queue.put(job):
            raise StoreError(CLOSED)

    # On the writer thread

    def _run_writer(self) -> None:
        while group := self._queue.take():
            # One whose caller has gone meanwhile is left out; who goes from here on changes nothing.
            if group := [job for job in group if job.is_given_up is None or not job.is_given_up()]:
                _tell_all(group, self._commit(group))
        self._disconnect()
        self._database.release()

    def _commit(self, group: list[_Job[Any]]) -> list[WriteOutcome[Any]]:
        try:
            if self._conn is None:
                self._conn = self._connect()
            outcomes = self._run(group, self._conn)
        except Exception as e:
            error = self._failed(len(group), e)
            return [WriteOutcome(error=error) for _ in group]
        self._failing.worked()
        return outcomes

    def _failed(self, count: int, error: Exception) -> StoreError:
        """As far as is known nothing was kept, and the next group starts afresh."""
        log.error("a group of %d writes failed", count, exc_info=error)
        self._disconnect()
        failed = StoreError(f"cannot write to the database: {_reason(error)}")
        failed.is_lasting = self._failing.failed()
        return failed

    def _run(self, group: list[_Job[Any]], conn: Connection) -> list[WriteOutcome[Any]]:
        """All in one transaction, each in a savepoint. What it raises is the group's failure: nothing was kept."""
        with conn.begin() as transaction:
            if len(group) == 1:
                return [self._run_alone(conn, transaction, group[0])]
            return [self._run_one(conn, job) for job in group]

    def _run_alone(self, conn: Connection, transaction: RootTransaction, job: _Job[Any]) -> WriteOutcome[Any]:
        """Without a savepoint: the transaction is as good, and two statements cheaper."""
        try:
            return WriteOutcome(result=job.work(conn))
        except BaseException as e:
            if not self._database.is_in_transaction(conn):
                raise StoreError(_reason(e)) from e
            transaction.rollback()
            return WriteOutcome(error=e)

    def _run_one(self, conn: Connection, job: _Job[Any]) -> WriteOutcome[Any]:
        savepoint = conn.begin_nested()
        try:
            result = job.work(conn)
            savepoint.commit()
        except BaseException as e:
            if not self._database.is_in_transaction(conn):
                raise StoreError(_reason(e)) from e
            savepoint.rollback()
            return WriteOutcome(error=e)
        return WriteOutcome(result=result)

    def _connect(self) -> Connection:
        """Locked and migrated."""
        conn = self._writes.connect()
        try:
            if self._lock:
                self._database.lock(conn)
            with conn.begin():
                is_current = schema.is_current(conn)
            if is_current:
                return conn
            if not self._lock:  # no migration under the feet of a running server
                self._database.lock(conn)
            with conn.begin():
                schema.migrate(conn)
            if self._lock:
                return conn
        except BaseException:
            conn.close()
            raise
        conn.close()
        self._database.release()
        return self._writes.connect()

    def _disconnect(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None


def _tell_all(group: list[_Job[Any]], outcomes: list[WriteOutcome[Any]]) -> None:
    """A loop is woken once for all of its own."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Job[Any], WriteOutcome[Any]]]] = {}
    for job, outcome in zip(group, outcomes, strict=True):
        if job.loop is None:
            _tell_each([(job, outcome)])
        else:
            by_loop.setdefault(job.loop, []).append((job, outcome))
    for loop, finished in by_loop.items():
        _tell_on(loop, _tell_each, finished)


def _tell_on(loop: asyncio.AbstractEventLoop, tell: Callable[[T], None], outcomes: T) -> None:
    try:
        loop.call_soon_threadsafe(tell, outcomes)
    except RuntimeError:
        pass  # it is closed, and nobody waits there


def _tell_each(outcomes: list[tuple[_Job[Any], WriteOutcome[Any]]]) -> None:
    for job, outcome in outcomes:
        try:
            job.tell(outcome)
        except Exception:  # the others are told all the same
            log.exception("the caller of a write is gone; its result is dropped")


def _settle(done: Future[T] | asyncio.Future[T], outcome: WriteOutcome[T]) -> None:
    if done.done():  # its caller has gone
        return
    if isinstance(outcome.error, StopIteration):  # no future takes one
        done.set_exception(RuntimeError(f"the work of a write raised {outcome.error!r}"))
    elif outcome.error is not None:
        done.set_exception(outcome.error)
    else:
        done.set_result(outcome.result)  # type: ignore[arg-type]


def _reason(error: BaseException) -> str:
    """The driver's own words, in one line."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return " ".join(str(cause).split())
