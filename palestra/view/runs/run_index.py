"""Rows of the list of runs, and metrics of long ones, kept in a small database beside the runs: a thousand runs are
listed at once, and one of ten thousand steps opens without reading all of them again.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

FOLDER = ".palestra-view"
FILE = f"{FOLDER}/index.sqlite"
OLD_FILE = ".palestra-view.sqlite"
VERSION = 2
"""Raised when rows or fingerprints change their form: what an older version kept is forgotten."""
TABLES = {"runs": "fingerprint BLOB, row BLOB", "metrics": "saved BLOB"}


class RunIndex:
    """Rows by the name of their run, each with the fingerprint of the files that it was made of. Where the folder
    cannot be written, nothing is kept."""

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        """Protects the connection: requests are answered in threads."""
        self._connection = _open(folder)

    def load(self) -> dict[str, tuple[tuple[int, ...], bytes]]:
        if self._connection is None:
            return {}
        with self._lock:
            try:
                rows = self._connection.execute("SELECT name, fingerprint, row FROM runs").fetchall()
                return {name: (msgspec.json.decode(known, type=tuple[int, ...]), row) for name, known, row in rows}
            except (sqlite3.Error, msgspec.DecodeError):
                return {}

    def store(self, rows: Mapping[str, tuple[tuple[int, ...], bytes]]) -> None:
        values = [(name, msgspec.json.encode(known), row) for name, (known, row) in rows.items()]
        self._write("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", values)

    def load_metrics(self, name: str) -> bytes | None:
        """The metrics of a run as they were stored."""
        if self._connection is None:
            return None
        with self._lock:
            try:
                found = self._connection.execute("SELECT saved FROM metrics WHERE name = ?", [name]).fetchone()
            except sqlite3.Error:
                return None
        return found[0] if found else None

    def store_metrics(self, name: str, saved: bytes) -> None:
        self._write("INSERT OR REPLACE INTO metrics VALUES (?, ?)", [(name, saved)])

    def forget(self, names: Iterable[str]) -> None:
        """Leaves out runs that were deleted."""
        gone = [(name,) for name in names]
        for table in TABLES:
            self._write(f"DELETE FROM {table} WHERE name = ?", gone)

    def _write(self, statement: str, values: Sequence[tuple[object, ...]]) -> None:
        if self._connection is None or not values:
            return
        with self._lock:
            try:
                with self._connection:
                    self._connection.executemany(statement, values)
            except sqlite3.Error:  # a full disk, or another dashboard that writes: the files are read again next time
                return


def _open(root: Path) -> sqlite3.Connection | None:
    folder, file = root / FOLDER, root / FILE
    if folder.is_symlink() or file.is_symlink():  # to whose database?
        return None
    try:
        if not folder.is_dir():
            folder.mkdir()
            (folder / ".gitignore").write_text("*\n")
            (root / OLD_FILE).unlink(missing_ok=True)
        connection = sqlite3.connect(file, check_same_thread=False, timeout=1.0)
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            for table in TABLES:
                connection.execute(f"DROP TABLE IF EXISTS {table}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        for table, columns in TABLES.items():
            connection.execute(f"CREATE TABLE IF NOT EXISTS {table} (name TEXT PRIMARY KEY, {columns})")
        connection.commit()
    except (sqlite3.DatabaseError, OSError):  # not a database, or a folder that cannot be written
        return None
    return connection
