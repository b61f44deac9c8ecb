"""A backup of a stopped server in one file: its database and its state folder.

The databases' own tools make the copies: SQLite's VACUUM INTO, PostgreSQL's pg_dump and pg_restore. A newer version
that restores a backup migrates it when its server starts, as it does with any older state.

Owns: the archive, what of a state folder is in it. Never touches: rows, what is in object storage.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from sqlalchemy import inspect
from sqlalchemy.exc import SQLAlchemyError

from palestra.store.dialects import Database, SqliteDatabase, database_of
from palestra.store.errors import StoreError
from palestra.store.queries.settings import INSTALLATION, delete_settings
from palestra.store.schema import alembic_version
from palestra.util.atomic_files import TEMPORARY, folder_beside, sync
from palestra.util.file_errors import file_error_text

ABOUT, DATABASE, STATE = "backup.json", "database", "state"
FORMAT = 1
LEFT_OUT = ("adapters", "vllm", "copying", "logs")
"""Folders of the state folder that can be made anew, or that are not needed."""


class AboutBackup(Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    version: str
    """Version of Palestra that made the backup."""
    database: Literal["sqlite", "postgresql"]
    created_at: float


def back_up(url: str, state: Path, target: Path, *, version: str) -> int:
    """Writes a backup, whole or not at all, and returns its size. Raises StoreError if a server uses the database."""
    if target.exists():
        raise StoreError(f"{target} exists already; choose another name")
    if not state.is_dir():
        raise StoreError(f"there is no state folder {state}; name it with --state, as for palestra serve")
    if url.startswith("sqlite") and not Path(url.partition(":///")[2]).is_file():
        raise StoreError(f"there is no database at {url}; name it with --database or --state, as for palestra serve")
    database = database_of(url)
    unfinished = target.with_name(target.name + TEMPORARY)
    with _stopped(database), folder_beside(target, mode=0o700) as folder:
        dump = folder / DATABASE
        _dump(database, dump)
        kind = "sqlite" if isinstance(database, SqliteDatabase) else "postgresql"
        about = folder / ABOUT
        about.write_bytes(msgspec.json.encode(AboutBackup(version=version, database=kind, created_at=time.time())))
        try:
            with tarfile.open(unfinished, "w") as archive:
                archive.add(about, ABOUT)
                archive.add(dump, DATABASE)
                for file in _state_files(state, database):
                    archive.add(file, f"{STATE}/{file.relative_to(state)}", recursive=False)
            unfinished.chmod(0o600)  # it holds the server's secret
            sync(unfinished)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    sync(target.parent)
    return target.stat().st_size


def restore(source: Path, url: str, state: Path) -> AboutBackup:
    """Restores a backup into an empty database and a new state folder. Raises StoreError if there is something."""
    file = Path(url.partition(":///")[2]) if url.startswith("sqlite") else None
    database = database_of(url) if file is None else None
    if file is not None and file.exists():
        raise StoreError(f"{file} exists already; restore into a new database")
    if state.exists() and any(state.iterdir()):
        raise StoreError(f"{state} is not empty; restore into a new state folder")
    try:
        with tarfile.open(source) as archive, folder_beside(state, mode=0o700) as folder:
            archive.extractall(folder, filter="data")
            about = msgspec.json.decode((folder / ABOUT).read_bytes(), type=AboutBackup)
            if about.format != FORMAT:
                raise StoreError(f"{source} is a backup of format {about.format}, which this version does not know")
            kind = "sqlite" if database is None else "postgresql"
            if about.database != kind:
                raise StoreError(f"{source} has a database of {about.database}; give a --database of that kind")
            (folder / STATE).mkdir(exist_ok=True)
            if database is not None:
                _load_postgres(database, folder / DATABASE)
            if state.exists():
                state.rmdir()
            (folder / STATE).rename(state)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                (folder / DATABASE).chmod(0o600)
                shutil.move(folder / DATABASE, file)
        _forget_installation(database_of(url))
    except (OSError, tarfile.TarError, msgspec.MsgspecError) as e:
        raise StoreError(f"{source} cannot be restored: {file_error_text(e) or e}") from e
    sync(state.parent)
    return about


def _forget_installation(database: Database) -> None:
    """The server that was backed up may still run: this one must not take its object storage for its own."""
    try:
        with database.writer().begin() as conn:
            delete_settings(conn, [INSTALLATION])
    except SQLAlchemyError as e:
        raise StoreError(f"cannot write to the database {database.url!r}: {e}") from e


@contextmanager
def _stopped(database: Database) -> Iterator[None]:
    """Holds the lock, so that no server runs meanwhile."""
    try:
        with database.writer().connect() as conn:
            database.lock(conn)
            try:
                yield
            finally:
                database.release()
    except (SQLAlchemyError, sqlite3.Error) as e:
        raise StoreError(f"cannot open the database {database.url!r}: {e}") from e


def _dump(database: Database, file: Path) -> None:
    if isinstance(database, SqliteDatabase):
        with closing(sqlite3.connect(database.file, isolation_level=None)) as conn:
            try:
                conn.execute("VACUUM INTO ?", (str(file),))
            except sqlite3.Error as e:
                raise StoreError(f"cannot copy the database {database.url!r} to {file.parent.parent}: {e}") from e
        return
    _run(database, "pg_dump", "--format=custom", "--no-owner", f"--file={file}")


def _load_postgres(database: Database, dump: Path) -> None:
    try:
        with database.writer().connect() as conn:
            if inspect(conn).has_table(alembic_version.name):
                raise StoreError(f"the database {database.url!r} is not empty; restore into a new one")
    except SQLAlchemyError as e:
        raise StoreError(f"cannot open the database {database.url!r}: {e}") from e
    _run(database, "pg_restore", "--no-owner", "--exit-on-error", "--single-transaction", dump)


def _run(database: Database, program: str, *arguments: str | Path) -> None:
    """Runs a program of PostgreSQL's on the database. The password is not among its arguments, which every user of the
    machine sees."""
    if shutil.which(program) is None:
        raise StoreError(f"{program} is needed for this; install PostgreSQL's client programs")
    url = database.url.set(drivername="postgresql")
    environment = os.environ if url.password is None else os.environ | {"PGPASSWORD": str(url.password)}
    where = url._replace(password=None).render_as_string()
    done = subprocess.run(
        [program, f"--dbname={where}", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise StoreError(f"{program} failed: {' '.join(done.stderr.split())}")


def _state_files(state: Path, database: Database) -> Iterator[Path]:
    """Yields the files and folders that must survive, folders first."""
    own = database.file.name if isinstance(database, SqliteDatabase) else ""
    for folder, folders, files in os.walk(state):
        if Path(folder) == state:
            folders[:] = [name for name in folders if name not in LEFT_OUT]
        if Path(folder) != state:
            yield Path(folder)
        for name in files:
            is_databases = bool(own) and Path(folder) == state and name.startswith(own)
            if not is_databases and name != "worker.json" and not name.endswith((".ipc", ".lock", TEMPORARY)):
                yield Path(folder) / name
