"""The instances of a server: made on request, found by id, ended by their owners or by time.

After a clean stop of the server its instances continue at the next start. After a crash those that were on disk
continue, since nothing happened to them; those that were in memory end with the state `error`, because it is not known
whether the last call was completed.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from palestra.environments.platform.catalog import app_of
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.pool_files import PoolFiles
from palestra.environments.platform.pool_memory import PoolMemory, TimerWheel
from palestra.environments.platform.pool_records import (
    DiskFull,
    DuplicateRequest,
    InstanceGone,
    InstanceOver,
    InstanceRecord,
    InstanceSpec,
    InstanceState,
    LimitReached,
    PoolLimits,
    PoolUsage,
)
from palestra.environments.platform.seeds import seed_named
from palestra.util.renamed import renamed

log = logging.getLogger(__name__)

ID_BYTES = 16  # 128 bits: whoever knows the id can call an instance's tools
SPARE_LINES = 10_000  # of the journal, before it is rewritten
CLOSED, TIMED_OUT = "closed by its owner", "not used for too long"
CRASHED, OTHER_VERSION = "lost in a crash, make another", "app updated, make another"


class InstancePool:
    def __init__(
        self, limits: PoolLimits | None = None, folder: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """`folder`: keeps instances on disk. Without it nothing outlives the process."""
        self.limits, self._clock = limits or PoolLimits(), clock
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="palestra-platform-")
        self.files = PoolFiles(folder or Path(self._temporary.name if self._temporary else ""))
        self._lock = threading.RLock()
        """Protects everything below. Building a seed and calling a tool happen outside."""
        self._records: dict[str, InstanceRecord] = {}
        self._teams: dict[str, set[str]] = {}
        """Instances that are not over, by team."""
        self._alive = 0
        """Number of instances of all teams that are not over."""
        self._requests: dict[tuple[str, str], str] = {}
        self._memory = PoolMemory(self.files, self.limits.max_resident_bytes)
        self._wheel = TimerWheel(clock())
        self._restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    # Making and finding

    def create(self, team: str, spec: InstanceSpec, request_id: str | None = None) -> InstanceRecord:
        """Makes an instance; a repeated request gives the same instance."""
        with self._lock:
            if (known := self._requested(team, spec, request_id)) is not None:
                return known
            self._check_room(team)
            record = self._new(team, spec, request_id)
        try:
            instance = Instance(seed_named(app_of(spec.app), spec.data), variables=spec.variables)
        except Exception as e:  # boundary: whatever it is, the record must not stay open
            with self._lock:
                self._end(record, InstanceState.ERROR, f"it could not be made: {e}")
            raise
        with self._lock:
            if record.is_over:  # it was closed meanwhile
                instance.close()
                return record
            self._memory.keep(record, instance)
            record.move(InstanceState.RUNNING, self._clock())
            try:
                self.files.note(record)
                self._memory.make_room()
            except OSError as e:
                raise self._unkept(record, e) from e
        return record

    def record(self, instance_id: str, team: str | None = None) -> InstanceRecord:
        """`team` None: whoever knows the id may ask."""
        found = self._records.get(instance_id)
        if found is None or (team is not None and found.team != team):
            raise InstanceGone
        return found

    def records(self, team: str) -> list[InstanceRecord]:
        with self._lock:
            return [record for record in self._records.values() if record.team == team]

    @contextmanager
    def use(self, instance_id: str) -> Iterator[Instance]:
        """Gives an instance, which stays open until the block ends, whatever happens to it meanwhile."""
        with self._lock:
            record = self.record(instance_id)
            if record.state is not InstanceState.RUNNING:
                raise InstanceOver(record)
            instance = record.instance or self._bring_back(record)
            record.users += 1
            record.updated_at = self._clock()
            self._memory.used(record)
        try:
            yield instance
        finally:
            with self._lock:
                self._leave(record, instance)

    @contextmanager
    def hold(self, instance_id: str) -> Iterator[None]:
        """Keeps an instance from ending for lack of use: its client is connected, and may think for long. It may be
        moved to disk."""
        with self._lock:
            record = self.record(instance_id)
            record.holders += 1
        try:
            yield
        finally:
            with self._lock:
                record.holders -= 1

    def replace(self, instance_id: str, data: str, variables: Mapping[str, str] | None = None) -> None:
        """Replaces the seed by another one of the same app, and the variables if they are given, as if the instance
        were new."""
        with self._lock:
            record = self.record(instance_id)
            if record.state is not InstanceState.RUNNING:
                raise InstanceOver(record)
            if record.users:
                raise PlatformError(f"instance {instance_id} is in use")
            wanted = record.wanted
            own = wanted.variables if variables is None else dict(variables)
            instance = Instance(seed_named(app_of(wanted.app), data), variables=own)
            self._memory.forget(record)
            self.files.drop(instance_id)
            record.wanted = msgspec.structs.replace(wanted, data=data, variables=own)
            self._memory.keep(record, instance)
            try:
                self.files.note(record)
            except OSError as e:
                raise self._unkept(record, e) from e

    # Ending

    def beat(self, instance_id: str, team: str) -> InstanceRecord:
        with self._lock:
            record = self.record(instance_id, team)
            if not record.is_over:
                record.updated_at = self._clock()
            return record

    def close(self, instance_id: str, team: str) -> InstanceRecord:
        """Closes an instance; one that is over does not change."""
        with self._lock:
            record = self.record(instance_id, team)
            if not record.is_over:
                self._end(record, InstanceState.STOPPED, CLOSED)
            return record

    def deadline(self, record: InstanceRecord) -> float:
        return record.deadline(self.limits)

    def tick(self) -> int:
        """Ends instances that are due, forgets those that ended long ago, and returns how many ended. To be called
        about once a second."""
        ended = 0
        with self._lock:
            now = self._clock()
            for instance_id, slot in self._wheel.due(now):
                record = self._records.get(instance_id)
                if record is None or record.slot != slot:
                    continue
                if record.holders and not record.is_over:
                    record.updated_at = now
                if record.deadline(self.limits) > now or record.users:
                    self._schedule(record)
                elif record.is_over:
                    self._forget(record)
                else:
                    self._end(record, InstanceState.STOPPED, TIMED_OUT)
                    ended += 1
            if self.files.lines > SPARE_LINES + 4 * len(self._records):
                self.files.begin(self._records.values())
        return ended

    def shut_down(self) -> None:
        """Moves all instances to disk, where they wait for the next start."""
        with self._lock:
            if self._temporary is None:
                self._memory.spill_all()
            for record in self._records.values():
                self._memory.forget(record)
            self.files.close()
            if self._temporary is not None:
                self._temporary.cleanup()

    def usage(self) -> PoolUsage:
        with self._lock:
            resident, size_bytes = len(self._memory), self._memory.size_bytes
            return PoolUsage(self._alive, resident, size_bytes, self._alive - resident, len(self._records))

    def count(self, team: str) -> int:
        return len(self._teams.get(team, ()))

    # Private methods, called with the lock held

    def _requested(self, team: str, spec: InstanceSpec, request_id: str | None) -> InstanceRecord | None:
        known = self._requests.get((team, request_id)) if request_id else None
        if known is None:
            return None
        record = self._records[known]
        if record.wanted != spec or record.state is InstanceState.PENDING:
            raise DuplicateRequest(record, is_same=record.wanted == spec)
        return record

    def _check_room(self, team: str) -> None:
        own = self.count(team)
        if own >= self.limits.max_per_team:
            raise LimitReached(own, self.limits.max_per_team, "you have")
        if self._alive >= self.limits.max_instances:
            raise LimitReached(self._alive, self.limits.max_instances, "the platform has")

    def _new(self, team: str, spec: InstanceSpec, request_id: str | None) -> InstanceRecord:
        now = self._clock()
        ttl_s = min(spec.ttl_s or self.limits.ttl_s, self.limits.max_age_s)
        record = InstanceRecord(secrets.token_hex(ID_BYTES), team, spec, now, now, ttl_s, request_id)
        self._enter(record)
        return record

    def _enter(self, record: InstanceRecord) -> None:
        self._records[record.id] = record
        if record.request_id:
            self._requests[record.team, record.request_id] = record.id
        if not record.is_over:
            self._teams.setdefault(record.team, set()).add(record.id)
            self._alive += 1
        self._schedule(record)

    def _schedule(self, record: InstanceRecord) -> None:
        record.slot = self._wheel.put(record.id, record.deadline(self.limits))

    def _end(self, record: InstanceRecord, state: InstanceState, reason: str) -> None:
        record.move(state, self._clock(), reason)
        team = self._teams[record.team]
        team.discard(record.id)
        self._alive -= 1
        if not team:
            del self._teams[record.team]
        if not record.users:  # otherwise the last user does it
            self._memory.forget(record)
        self._schedule(record)
        try:
            self.files.drop(record.id)
            self.files.note(record)
        except OSError as e:  # it is over all the same; a restart that finds no state of it ends it, too
            log.warning("the end of instance %s cannot be written to disk: %s", record.id, e)

    def _unkept(self, record: InstanceRecord, error: OSError) -> DiskFull:
        """Returns the error for an instance that a restart would not know: it is not given out."""
        self._end(record, InstanceState.ERROR, f"the platform's disk is full or not writable: {error}")
        return DiskFull(record)

    def _forget(self, record: InstanceRecord) -> None:
        del self._records[record.id]
        if record.request_id:
            del self._requests[record.team, record.request_id]

    def _leave(self, record: InstanceRecord, instance: Instance) -> None:
        record.users -= 1
        if record.is_over:
            if not record.users:
                self._memory.forget(record)
            return
        self._memory.measure(record, instance)
        try:
            self._memory.make_room()
        except OSError as e:  # the call was made, so its caller gets the result
            log.warning("memory is full, and no instance can be moved to disk: %s", e)

    def _bring_back(self, record: InstanceRecord) -> Instance:
        try:
            return self._memory.bring_back(record)
        except (FileNotFoundError, sqlite3.Error, PlatformError) as e:
            self._end(record, InstanceState.ERROR, f"its state cannot be read from disk: {e}")
            raise InstanceOver(record) from e
        except OSError as e:  # e.g. too many open files: it may work later
            raise PlatformError(f"instance {record.id} cannot be read from disk now: {e}; ask again") from e

    def _restore(self) -> None:
        now = self._clock()
        lost: list[InstanceRecord] = []
        for entry in self.files.entries():
            record = entry.record(now)
            if record.ended_at is not None and record.deadline(self.limits) <= now:
                continue
            self._enter(record)
            if not record.is_over and (reason := self._reason_to_end(record)):
                lost.append(record)
                record.reason = reason
        self.files.begin(self._records.values())
        for record in lost:
            self._end(record, InstanceState.ERROR, record.reason)
        self.files.drop_others(record.id for record in self._records.values() if not record.is_over)
        if alive := self.usage().instances:
            log.info("%d instances continue, %d were lost in a crash", alive, len(lost))

    def _reason_to_end(self, record: InstanceRecord) -> str:
        if not self.files.has(record.id):
            return CRASHED
        try:
            return "" if app_of(record.wanted.app).version == record.wanted.version else OTHER_VERSION
        except PlatformError as e:
            return str(e)


if not TYPE_CHECKING:  # type checkers know the new names only
    __getattr__ = renamed(__name__, Pool="InstancePool")
