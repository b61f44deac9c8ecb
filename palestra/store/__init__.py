"""Everything that must survive a restart: the database (sessions, models, samplers, checkpoints, keys) and the journal
of requests.

Owns: durability, migrations, one server per database. Never touches: HTTP, engines, the files of a checkpoint.

Queries are functions that take a `Connection`. They live in `queries` and are passed to `Store.write` and
`Store.read`: `await store.write(lambda conn: sessions.insert_session(conn, session))`.

Begin at `database` and `journal.journal`.
"""

from palestra.store.database import Store
from palestra.store.errors import (
    CheckpointExists,
    JournalError,
    KeyExists,
    StoreError,
    StoreLocked,
    StoreTooNew,
)
from palestra.store.journal.database_journal import DatabaseJournal
from palestra.store.journal.file_journal import FileJournal
from palestra.store.journal.journal import Journal, Position

__all__ = [
    "CheckpointExists",
    "DatabaseJournal",
    "FileJournal",
    "Journal",
    "JournalError",
    "KeyExists",
    "Position",
    "Store",
    "StoreError",
    "StoreLocked",
    "StoreTooNew",
]
