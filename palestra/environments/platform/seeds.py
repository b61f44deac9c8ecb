"""Seed databases: built once for an app, a number and a size, then copied for each instance."""

from __future__ import annotations

import hashlib
import random
import sqlite3
import threading
from collections import OrderedDict

from palestra.environments.platform.app import SeedDatabase, SeedSize, TaskApp
from palestra.environments.platform.changes import watch
from palestra.environments.platform.errors import PlatformError

MAX_KEPT = 512  # seed databases, with a connection each: 0.1 to 0.5 MiB
PAGE_BYTES = 1024  # tables are small and many: with SQLite's 4096 an instance of `stay` takes twice the memory
DEFAULT_DATA = "small-0"
"""The key of the world that is used if none is named."""
CLOCK = "now"
CLOCK_START_S = 9 * 3600  # nine in the morning of the world's CURRENT_DATE


_kept: OrderedDict[tuple[str, str, int, SeedSize], SeedDatabase] = OrderedDict()
_lock = threading.Lock()
"""Protects the cache. Building takes milliseconds, so other callers wait meanwhile."""


def seed_of(app: TaskApp, number: int, size: SeedSize) -> SeedDatabase:
    name = (app.key, app.version, number, size)
    with _lock:
        if (found := _kept.get(name)) is not None:
            _kept.move_to_end(name)
            return found
        made = _kept[name] = _build(app, number, size)
        if len(_kept) > MAX_KEPT:
            _kept.popitem(last=False)
        return made


def seed_named(app: TaskApp, key: str) -> SeedDatabase:
    """Returns the database with this `SeedDatabase.key`."""
    size, _, number = key.partition("-")
    if size not in {*SeedSize} or not number.isdecimal() or len(number) > 9:
        raise PlatformError(f"{app.key} has no data {key!r}; a key looks like small-17 (sizes: {', '.join(SeedSize)})")
    return seed_of(app, int(number), SeedSize(size))


def numbered(rng: random.Random, count: int) -> range:
    """Returns ids for rows that a call can name: they begin at a random number, so that they cannot be guessed."""
    first = rng.randrange(1000, 9000)
    return range(first, first + count)


def _build(app: TaskApp, number: int, size: SeedSize) -> SeedDatabase:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.executescript(app.schema)
    connection.execute("BEGIN")
    variables = app.fill(connection, random.Random(f"{app.key}/{app.version}/{number}/{size}"), size)
    connection.execute("COMMIT")
    watch(connection, app.fixed)
    connection.execute("INSERT INTO _facts VALUES (?, ?)", (CLOCK, _morning_of(variables["CURRENT_DATE"])))
    connection.execute("VACUUM")
    data = connection.serialize()
    connection.execute("PRAGMA query_only = 1")
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return SeedDatabase(app, number, size, data, digest, variables, connection, threading.Lock())


def _morning_of(day: str) -> str:
    hours, rest = divmod(CLOCK_START_S, 3600)
    return f"{day}T{hours:02d}:{rest // 60:02d}:00"
