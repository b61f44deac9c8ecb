"""Opens a journal where the config says, with what is left where it was before.

Owns: moving records from files to the database and back. Never touches: what a record means.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Literal

from palestra.store.database import Store
from palestra.store.journal.database_journal import DatabaseJournal
from palestra.store.journal.file_journal import FileJournal
from palestra.store.journal.journal import Journal
from palestra.store.journal.segments import find_segments

log = logging.getLogger(__name__)

MOVED_AT_ONCE = 16 << 20  # bytes in memory

JournalPlace = Literal["files", "database"]


async def open_journal(place: JournalPlace, name: str, folder: Path, store: Store, *, patience_s: float) -> Journal:
    """Opens the journal `name`, in the folder or in the database. Records that are in the other place are moved first;
    if that is interrupted, some are in both, and the reader has to expect it."""

    def open_in(where: JournalPlace) -> Journal:
        if where == "files":
            return FileJournal.open(folder, patience_s=patience_s)
        return DatabaseJournal.open(store, name, patience_s=patience_s)

    if place == "files" or find_segments(folder):
        async with open_in("database" if place == "files" else "files") as old, open_in(place) as new:
            if moved := await _move(old, new):
                log.warning("moved %d records of the journal %s to the %s", moved, name, place)
    return open_in(place)


async def _move(old: Journal, new: Journal) -> int:
    """Appends all records and releases them in the old place; returns their number."""
    moved, waiting, waiting_bytes = [], [], 0
    for position, record in old.recover():
        waiting.append(new.append_soon(record))
        waiting_bytes += len(record)
        moved.append(position)
        if waiting_bytes > MOVED_AT_ONCE:
            await asyncio.gather(*waiting)
            waiting, waiting_bytes = [], 0
    await asyncio.gather(*waiting)
    for position in moved:
        old.release(position)
    return len(moved)
