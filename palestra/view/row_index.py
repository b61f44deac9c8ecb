"""Rows of the list of runs, kept in a small database beside the runs, so that a thousand of them are listed at once.

Owns: the file, which may be deleted at any time. Never touches: what a row says; files of runs stay the truth.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

FILE = ".palestra-view.sqlite"
VERSION = 1
"""Raised when rows or fingerprints change their form: what an older version kept is forgotten."""


class RowIndex:
    """Rows by the name of their run, each with the fingerprint of the files that it was made of. Where the folder
    cannot be written, nothing is kept."""

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        """Protects the connection: requests are answered in threads."""
        self._connection = _open(folder / FILE)

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
        if self._connection is None or not rows:
            return
        values = [(name, msgspec.json.encode(known), row) for name, (known, row) in rows.items()]
        with self._lock:
            try:
                with self._connection:
                    self._connection.executemany("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", values)
            except sqlite3.Error:  # a full disk, or another dashboard that writes: the rows are read again next time
                return


def _open(file: Path) -> sqlite3.Connection | None:
    try:
        connection = sqlite3.connect(file, check_same_thread=False, timeout=1.0)
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            connection.execute("DROP TABLE IF EXISTS runs")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("CREATE TABLE IF NOT EXISTS runs (name TEXT PRIMARY KEY, fingerprint BLOB, row BLOB)")
        connection.commit()
    except sqlite3.DatabaseError:  # not a database, or a folder that cannot be written
        return None
    return connection
