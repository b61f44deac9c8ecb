"""Traces that are too old for the database, as compressed lines of JSON in object storage.

A trace is deleted only when its file is stored; if the server is killed in between, it is archived once more.

Owns: the files. Never touches: which traces are old.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from pathlib import Path

import msgspec
import zstandard
from msgspec import Struct

from palestra.store import Store
from palestra.store.queries.traces import Purge, Trace, TraceTurn, delete_traces, traces_to_purge, turns_of
from palestra.util.object_storage import ObjectStorage

MAX_TURNS = 5_000  # of one file


class ArchivedTrace(Struct, frozen=True, kw_only=True):
    """A line of an archive."""

    trace: Trace
    turns: list[TraceTurn]


class TraceArchive:
    def __init__(self, store: Store, url: str):
        self._store, self._storage = store, ObjectStorage(url)

    async def purge(self, purge: Purge) -> None:
        """Moves traces from the database to the archive. Raises StorageError or StoreError; what was not archived
        stays."""
        old = await self._store.read(lambda c: traces_to_purge(c, purge))
        while old:
            part = [old.pop()]
            while old and sum(trace.turns for trace in part) + old[-1].turns <= MAX_TURNS:
                part.append(old.pop())
            await asyncio.to_thread(self._put, part)
            await self._store.write(lambda c, part=part: delete_traces(c, part))

    def _put(self, traces: list[Trace]) -> None:
        with tempfile.NamedTemporaryFile() as file:
            with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as lines:
                for trace in traces:
                    turns = self._store.read_now(lambda c, trace=trace: turns_of(c, trace.trace_id))
                    lines.write(msgspec.json.encode(ArchivedTrace(trace=trace, turns=turns)) + b"\n")
            file.flush()
            day = time.strftime("%Y-%m-%d", time.gmtime())
            self._storage.put(Path(file.name), f"traces/{day}/{uuid.uuid4().hex}.jsonl.zst")
