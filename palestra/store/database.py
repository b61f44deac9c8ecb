"""The database, used from threads: one writer that commits in groups, a few readers.

Owns: transactions, the writer thread, opening and closing. Never touches: what is in the tables.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar

from sqlalchemy import Connection, RootTransaction, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from palestra.store import schema
from palestra.store.commit_queue import GroupQueue
from palestra.store.dialects import READERS, Database, database_of
from palestra.store.errors import StoreError, StoreLocked
from palestra.store.queries.settings import get_setting, put_setting
from palestra.store.write_failures import WriteFailures

T = TypeVar("T")

log = logging.getLogger(__name__)

CLOSED = "the store is closed"
ANSWER_S = 5.0  # a database that needs longer for nothing is in trouble
ACTIVE = "active_server"
"""Name of the setting that says which server is active."""


@dataclass(slots=True)
class WriteOutcome(Generic[T]):
    result: T | None = None
    error: BaseException | None = None


@dataclass(slots=True)
class _Job(Generic[T]):
    work: Callable[[Connection], T]
    tell: Callable[[WriteOutcome[T]], None]
    loop: asyncio.AbstractEventLoop | None
    """The event loop on which the caller is informed. None: on the writer's thread."""
    is_given_up: Callable[[], bool] | None = None


class Store:
    """Use as `async with Store.open(url) as store`, or with a plain `with` where there is no event loop."""

    def __init__(self, database: Database, *, lock: bool, patience_s: float) -> None:
        self._database = database
        self._failing = WriteFailures(patience_s)
        self._lock = lock
        self._writes = database.writer()
        self._reads = database.readers()
        self._conn: Connection | None = None
        """The writer thread's connection, once it runs."""
        self.on_lock_lost: Callable[[], None] = lambda: None
        """Called on the writer's thread when its connection was lost and another server has or had the lock since."""
        self._place: str | None = None
        """What `take_place` has written."""
        self._queue: GroupQueue[_Job[Any]] = GroupQueue()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-reader")
        self._writer = threading.Thread(target=self._run_writer, name="store-writer", daemon=True)

    @classmethod
    def open(cls, url: str, *, lock: bool = True, patience_s: float = math.inf) -> Self:
        """Creates folders and file, migrates the schema and takes the lock. Without `lock` it works beside a running
        server. Errors of writes count as lasting when nothing could be written for `patience_s`."""
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

    async def take_place(self) -> None:
        """Notes in the database that this server is the active one. If another one does so while the connection is
        lost, this one cannot write any more: what it knows is no longer true."""
        place = uuid.uuid4().hex
        await self.write(lambda c: put_setting(c, ACTIVE, place))
        self._place = place

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Runs `work` in a transaction, which is durable when this returns. If `work` fails, nothing of it is kept and
        its error is raised here."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._submit(_Job(work, partial(_settle, done), loop, done.cancelled))
        return await done

    def write_now(self, work: Callable[[Connection], T]) -> T:
        done: Future[T] = Future()
        self._submit(_Job(work, partial(_settle, done), None))
        return done.result()

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Runs `work` on one consistent view of the database, without waiting for writes."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self.read_now, work)

    def read_now(self, work: Callable[[Connection], T]) -> T:
        with self._reads.connect() as conn:
            return work(conn)

    async def trouble(self) -> str | None:
        """Returns why the database does not answer; None if it does."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.read(lambda conn: conn.execute(text("SELECT 1")).scalar_one())
        except (SQLAlchemyError, sqlite3.Error, TimeoutError) as e:
            return f"the database does not answer: {str(e) or f'not within {ANSWER_S:g} s'}"
        return None

    async def close(self) -> None:
        """Closes the store after everything that is queued has been written."""
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
            # Skip jobs whose caller has been cancelled meanwhile. A caller that is cancelled from here on changes
            # nothing.
            if group := [job for job in group if job.is_given_up is None or not job.is_given_up()]:
                _tell_all(group, self._commit(group))
        if self._conn is not None:
            self._database.unlock(self._conn)
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
        """Returns the error for the callers of a group that failed. As far as is known nothing was kept, and the next
        group starts afresh."""
        log.error("a group of %d writes failed", count, exc_info=error)
        self._disconnect()
        if isinstance(error, StoreLocked):
            self.on_lock_lost()
        failed = StoreError(f"cannot write to the database: {_reason(error)}")
        failed.is_lasting = self._failing.failed()
        return failed

    def _run(self, group: list[_Job[Any]], conn: Connection) -> list[WriteOutcome[Any]]:
        """Runs all jobs in one transaction, each in a savepoint. An exception here is the failure of the whole group:
        nothing was kept."""
        with conn.begin() as transaction:
            if len(group) == 1:
                return [self._run_alone(conn, transaction, group[0])]
            return [self._run_one(conn, job) for job in group]

    def _run_alone(self, conn: Connection, transaction: RootTransaction, job: _Job[Any]) -> WriteOutcome[Any]:
        """Runs a single job without a savepoint: the transaction alone protects as well, and saves two statements."""
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
        """Opens the writer's connection, takes the lock and migrates."""
        conn = self._writes.connect()
        try:
            if self._lock:
                self._database.lock(conn)
            with conn.begin():
                is_current = schema.is_current(conn)
                if self._place is not None and get_setting(conn, ACTIVE) != self._place:
                    raise StoreLocked("another server has used the database while the connection to it was lost")
            if is_current:
                return conn
            if not self._lock:  # a schema must not be migrated while another server uses it
                self._database.lock(conn)
            with conn.begin():
                schema.bring_up_to_date(conn)
            if self._lock:
                return conn
        except BaseException:
            conn.close()
            raise
        self._database.unlock(conn)
        conn.close()
        self._database.release()
        return self._writes.connect()

    def _disconnect(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None


def _tell_all(group: list[_Job[Any]], outcomes: list[WriteOutcome[Any]]) -> None:
    """Informs the callers of all jobs, and wakes up each event loop only once."""
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
        pass  # the loop is closed, so no caller waits there


def _tell_each(outcomes: list[tuple[_Job[Any], WriteOutcome[Any]]]) -> None:
    for job, outcome in outcomes:
        try:
            job.tell(outcome)
        except Exception:  # the callers of the other jobs must be informed all the same
            log.exception("the caller of a write is gone; its result is dropped")


def _settle(done: Future[T] | asyncio.Future[T], outcome: WriteOutcome[T]) -> None:
    if done.done():  # its caller was cancelled
        return
    if isinstance(outcome.error, StopIteration):  # a future does not accept a StopIteration
        done.set_exception(RuntimeError(f"the work of a write raised {outcome.error!r}"))
    elif outcome.error is not None:
        done.set_exception(outcome.error)
    else:
        done.set_result(outcome.result)  # type: ignore[arg-type]


def _reason(error: BaseException) -> str:
    """Returns the message of the database driver, in one line."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return " ".join(str(cause).split())
