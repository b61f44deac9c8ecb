"""SQLite and PostgreSQL: how each is connected to, and how each is locked for one server.

Owns: URLs, connection settings, the lock. Never touches: tables, transactions.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from palestra.store.errors import StoreError, StoreLocked
from palestra.util.locks import FileLock, Locked

READERS = 4  # reads are short; more readers would only compete for the interpreter
BUSY_MS = 10_000  # the CLI writes beside a server, a few milliseconds at a time
# waits for the lock at once: a read transaction that later becomes a write transaction cannot wait
BEGIN = "BEGIN IMMEDIATE"
ADVISORY_LOCK = 0x50414C4553545241  # "PALESTRA" in ASCII; in PostgreSQL these locks belong to one database


class Database(ABC):
    def __init__(self, url: URL) -> None:
        self.url = url

    @abstractmethod
    def writer(self) -> Engine: ...

    @abstractmethod
    def readers(self) -> Engine: ...

    @abstractmethod
    def lock(self, conn: Connection) -> None:
        """Takes the lock, which is held until the writer's connection `conn` is closed and `release` is called. Raises
        `StoreLocked` if another server holds it."""

    @abstractmethod
    def unlock(self, conn: Connection) -> None:
        """Returns what of the lock the connection itself holds, before it is closed in order."""

    @abstractmethod
    def release(self) -> None: ...

    @abstractmethod
    def is_in_transaction(self, conn: Connection) -> bool:
        """Asks the driver whether a transaction is open: some errors (a full disk, a lost connection) end one without
        being asked."""

    def _locked(self, by: str) -> StoreLocked:
        return StoreLocked(f"another server uses the database {self.url!r}{by}; stop it, or use another database")


class SqliteDatabase(Database):
    def __init__(self, url: URL) -> None:
        super().__init__(url)
        if not url.database or url.database == ":memory:":
            raise StoreError("an SQLite database needs a file, e.g. sqlite:////var/lib/palestra/palestra.db")
        self.file = Path(url.database)
        self._lock: FileLock | None = None
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            # Readable by its owner alone, since it holds the server's secret. SQLite gives its side files the same
            # mode.
            os.close(os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as e:
            raise StoreError(f"cannot use the database file {self.file}: {e.strerror}") from e

    def writer(self) -> Engine:
        engine = create_engine(self.url, poolclass=NullPool)
        self._settings(engine, begin=BEGIN, journal_mode="WAL", synchronous="FULL", foreign_keys="ON")
        return engine

    def readers(self) -> Engine:
        engine = create_engine(self.url, pool_size=READERS, max_overflow=0)
        self._settings(engine, begin="BEGIN", query_only="ON")
        return engine

    def _settings(self, engine: Engine, *, begin: str, **pragmas: str) -> None:
        @event.listens_for(engine, "connect")
        def on_connect(raw: Any, _record: Any) -> None:
            raw.isolation_level = None  # otherwise the driver begins transactions in its own way, without savepoints
            raw.execute(f"PRAGMA busy_timeout={BUSY_MS}")
            for name, value in pragmas.items():
                raw.execute(f"PRAGMA {name}={value}")

        @event.listens_for(engine, "begin")
        def on_begin(conn: Connection) -> None:
            conn.exec_driver_sql(begin)

    def lock(self, conn: Connection) -> None:
        if self._lock is not None:
            return
        try:
            self._lock = FileLock(Path(f"{self.file}.lock"), note=f"{os.getpid()}\n".encode())
        except Locked as e:
            pid = e.note.decode(errors="replace").strip()
            raise self._locked(f" (process {pid})" if pid else "") from e

    def unlock(self, conn: Connection) -> None:
        pass

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def is_in_transaction(self, conn: Connection) -> bool:
        raw = conn.connection.dbapi_connection
        return raw is not None and raw.in_transaction


# A machine that has lost power closes no connection. With these settings the database gives up on it after 11 s (and a
# server on a database) in place of two hours, and a standby can have the lock. The last one is for data that was sent
# and not acknowledged, during which no keepalives are sent; in milliseconds.
KEEPALIVES = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "user_timeout": 11_000}
CONNECT_ARGS = {name.replace("user_timeout", "tcp_user_timeout"): value for name, value in KEEPALIVES.items()}


class PostgresDatabase(Database):
    """PostgreSQL. The lock belongs to the writer's connection: a server that loses the connection can neither write nor
    keep the lock."""

    def __init__(self, url: URL) -> None:
        super().__init__(url if "connect_timeout" in url.query else url.update_query_dict({"connect_timeout": "10"}))
        if find_spec("psycopg") is None:
            raise StoreError("PostgreSQL needs its driver: pip install 'palestra[postgres]'")

    def writer(self) -> Engine:
        return create_engine(self.url, poolclass=NullPool, connect_args=CONNECT_ARGS)

    def readers(self) -> Engine:
        # REPEATABLE READ: a page and its total count come from one snapshot, as with SQLite.
        engine = create_engine(
            self.url, pool_size=READERS, max_overflow=0, pool_pre_ping=True, connect_args=CONNECT_ARGS
        )
        return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    def lock(self, conn: Connection) -> None:
        if not conn.execute(text("SELECT pg_try_advisory_lock(:id)"), {"id": ADVISORY_LOCK}).scalar_one():
            raise self._locked("")
        for name, value in KEEPALIVES.items():
            conn.execute(text(f"SET tcp_{name} = {value}"))
        conn.commit()

    def unlock(self, conn: Connection) -> None:
        # PostgreSQL notices only after a while that a connection was closed: whoever opens the database next would be
        # told that it is in use.
        with suppress(SQLAlchemyError):
            conn.execute(text("SELECT pg_advisory_unlock_all()"))
            conn.commit()

    def release(self) -> None:
        pass

    def is_in_transaction(self, conn: Connection) -> bool:
        return not conn.invalidated


def database_of(url: str) -> Database:
    try:
        parsed = make_url(url)
    except ArgumentError as e:
        raise StoreError(f"not a database URL: {url!r}; try sqlite:////path/to/palestra.db or postgresql://…") from e
    match parsed.get_backend_name():
        case "sqlite":
            return SqliteDatabase(parsed.set(drivername="sqlite"))
        case "postgresql" | "postgres":
            return PostgresDatabase(parsed.set(drivername="postgresql+psycopg"))
        case other:
            raise StoreError(f"unknown kind of database {other!r}; there are: sqlite, postgresql")
