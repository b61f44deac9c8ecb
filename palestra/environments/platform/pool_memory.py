"""Decides which instances of a pool are in memory and which are on disk, and when something is due."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict

from palestra.environments.platform.catalog import app_of
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.pool_files import PoolFiles
from palestra.environments.platform.pool_records import InstanceRecord
from palestra.environments.platform.seeds import PAGE_BYTES, seed_named


class TimerWheel:
    def __init__(self, now: float) -> None:
        self._slots: dict[int, list[str]] = {}
        self._next = math.floor(now)
        """The first second that was not processed yet."""

    def put(self, key: str, at: float) -> int:
        """Returns the slot of an entry. If a key is put again, its caller remembers the newest slot: the older entry is
        void."""
        slot = max(math.ceil(at), self._next)
        self._slots.setdefault(slot, []).append(key)
        return slot

    def due(self, now: float) -> list[tuple[str, int]]:
        """Removes and returns due entries with their slots. If the clock was set back, nothing is due until it has
        caught up."""
        found: list[tuple[str, int]] = []
        for slot in range(self._next, math.floor(now) + 1):
            found += [(key, slot) for key in self._slots.pop(slot, ())]
        self._next = max(self._next, math.floor(now) + 1)
        return found


log = logging.getLogger(__name__)

CONNECTION_BYTES = 50 << 10  # of a used connection, in addition to its pages
PARSED = 14  # bytes for each character of tables and triggers, which each connection has parsed (measured on five apps)


class PoolMemory:
    def __init__(self, files: PoolFiles, max_bytes: int) -> None:
        self._files, self._max_bytes = files, max_bytes
        self._resident: OrderedDict[str, InstanceRecord] = OrderedDict()
        """Instances in memory, the least recently used first."""
        self.size_bytes = 0
        self._overheads: dict[str, int] = {}
        """Bytes in addition to the pages of an instance, by app."""

    def __len__(self) -> int:
        return len(self._resident)

    def keep(self, record: InstanceRecord, instance: Instance, state: bytes | None = None) -> None:
        """`state` is what it was opened with, if that is not the seed."""
        record.instance, record.writes = instance, instance.connection.total_changes
        record.size_bytes = len(instance.seed.data if state is None else state) + self._overhead(instance)
        self.size_bytes += record.size_bytes
        self._resident[record.id] = record

    def used(self, record: InstanceRecord) -> None:
        self._resident.move_to_end(record.id)

    def measure(self, record: InstanceRecord, instance: Instance) -> None:
        """Updates the size after a use, which may have written."""
        if (writes := instance.connection.total_changes) == record.writes:
            return
        record.writes = writes
        pages = instance.connection.execute("PRAGMA page_count").fetchone()[0]
        size_bytes = pages * PAGE_BYTES + self._overhead(instance)
        self.size_bytes += size_bytes - record.size_bytes
        record.size_bytes = size_bytes

    def forget(self, record: InstanceRecord) -> None:
        if record.instance is not None:
            record.instance.close()
            record.instance = None
            self.size_bytes -= record.size_bytes
            del self._resident[record.id]

    def make_room(self) -> None:
        """Moves unused instances to disk while there are too many. Raises OSError if the disk does not accept them."""
        while self.size_bytes > self._max_bytes:
            idle = next((record for record in self._resident.values() if not record.users), None)
            if idle is None:
                return
            self._spill(idle)

    def spill_all(self) -> None:
        """Moves all to disk; one that the disk does not accept is lost, the others are not."""
        for record in list(self._resident.values()):
            try:
                self._spill(record)
            except OSError as e:
                log.warning(
                    "instance %s ends with this process, because it cannot be written to disk (%s)", record.id, e
                )

    def bring_back(self, record: InstanceRecord) -> Instance:
        """Loads an instance from disk. Raises OSError, sqlite3.Error, PlatformError."""
        state = self._files.take_back(record.id)
        seed = seed_named(app_of(record.wanted.app), record.wanted.data)
        instance = Instance(seed, state, record.wanted.variables)
        _ = instance.now  # a file that is no database raises here
        self.keep(record, instance, state)
        return instance

    def _spill(self, record: InstanceRecord) -> None:
        assert record.instance is not None
        self._files.spill(record.id, record.instance.snapshot())
        self.forget(record)

    def _overhead(self, instance: Instance) -> int:
        app = instance.app.key
        if app not in self._overheads:
            (found,) = instance.seed.rows("SELECT sum(length(sql)) AS size FROM sqlite_master")
            self._overheads[app] = CONNECTION_BYTES + PARSED * found["size"]
        return self._overheads[app]
