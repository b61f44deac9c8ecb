"""The files of a pool: a journal of instances, and the states of those that were moved out of memory.

Writes to the journal are not synced: a crash of the process loses none, one of the machine may.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.pool_records import InstanceRecord, InstanceSpec, InstanceState
from palestra.util.atomic_files import naming
from palestra.util.locks import FileLock, Locked

if TYPE_CHECKING:
    from io import FileIO

SECRET_BYTES = 32


class PoolJournalEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the journal: a record at some time; the last one of an id counts."""

    id: str
    team: str
    wanted: InstanceSpec
    created_at: float
    ttl_s: float
    state: InstanceState
    request_id: str | None = None
    reason: str = ""
    ended_at: float | None = None

    @classmethod
    def of(cls, record: InstanceRecord) -> PoolJournalEntry:
        names = (name for name in cls.__struct_fields__)
        return cls(**{name: getattr(record, name) for name in names})

    def record(self, now: float) -> InstanceRecord:
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return InstanceRecord(**fields, updated_at=self.ended_at or now)


class PoolFiles:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._states = folder / "instances"
        self._states.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(folder / "lock")
        self._journal: FileIO | None = None
        self.lines = 0
        self._is_cut = False
        """Whether the disk was full in the middle of a line."""

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._lock.release()

    def secret(self) -> bytes:
        """Returns the secret of this folder for tokens, the same after a restart."""
        path = self.folder / "secret"
        if not path.exists():
            _write_whole(path, secrets.token_bytes(SECRET_BYTES))
        return path.read_bytes()

    # Journal

    def entries(self) -> list[PoolJournalEntry]:
        """Returns the newest entry of each id, oldest instances first. A line that a crash cut short is skipped."""
        found: dict[str, PoolJournalEntry] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in self._path.read_bytes().splitlines():
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                    entry = msgspec.json.decode(line, type=PoolJournalEntry)
                    found[entry.id] = entry
        return list(found.values())

    def begin(self, records: Iterable[InstanceRecord]) -> None:
        """Rewrites the journal with the present records."""
        lines = [msgspec.json.encode(PoolJournalEntry.of(record)) + b"\n" for record in records]
        _write_whole(self._path, b"".join(lines))
        if self._journal is not None:
            self._journal.close()
        self._journal = self._path.open("ab", buffering=0)
        self.lines, self._is_cut = len(lines), False

    def note(self, record: InstanceRecord) -> None:
        """Appends a record. Raises OSError: then nothing was written, and the next line is whole again."""
        assert self._journal is not None
        line = b"\n" * self._is_cut + msgspec.json.encode(PoolJournalEntry.of(record)) + b"\n"
        self._is_cut = True
        while line:
            line = line[self._journal.write(line) :]
        self._is_cut = False
        self.lines += 1

    # States

    def spill(self, instance_id: str, state: bytes) -> None:
        _write_whole(self._states / instance_id, state)

    def take_back(self, instance_id: str) -> bytes:
        """Returns a state and deletes it from the disk, so that what is there is always the newest."""
        path = self._states / instance_id
        state = path.read_bytes()
        path.unlink()
        return state

    def has(self, instance_id: str) -> bool:
        return (self._states / instance_id).exists()

    def drop(self, instance_id: str) -> None:
        (self._states / instance_id).unlink(missing_ok=True)

    def drop_others(self, kept: Iterable[str]) -> None:
        known = set(kept)
        for path in self._states.iterdir():
            if path.name not in known:
                path.unlink()

    @property
    def _path(self) -> Path:
        return self.folder / "journal.jsonl"


def _locked(path: Path) -> FileLock:
    """Locks the folder: two pools in one folder would end each other's instances."""
    try:
        return FileLock(path)
    except Locked:
        raise PlatformError(f"another platform uses {path.parent}; choose another folder") from None


def _write_whole(path: Path, data: bytes) -> None:
    """Writes a file completely, or not at all."""
    part = path.with_name(f"{path.name}.part")
    with naming(path), os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    part.replace(path)
