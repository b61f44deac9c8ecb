"""Checkpoints in object storage: uploaded file by file with a manifest last, and fetched into a bounded cache.

A checkpoint is there when its manifest is, and does not change from then on. What was uploaded of a folder is noted
beside it, so that an upload that was interrupted goes on with the files that are missing.

Owns: objects below the URL, the notes. Never touches: the database, what is in a file.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from threading import Lock

import msgspec
import structlog
from msgspec import Struct

from palestra.util.atomic_files import remove_folder, replacing, whole_folder
from palestra.util.object_storage import ObjectLost, ObjectStorage, sha256_of

log = structlog.get_logger()

MANIFEST = "manifest.json"
LOCKS = 64
DEPTH = 3  # the parts of a folder's name below the root: model, kind, name


class StoredFile(Struct, frozen=True):
    size_bytes: int
    sha256: str


class Manifest(Struct, frozen=True, kw_only=True):
    format: int = 1
    files: dict[str, StoredFile]
    """Files by their names in the folder, with `/`."""


class UploadNote(Struct, kw_only=True):
    """What of a folder is in the storage."""

    files: dict[str, StoredFile] = {}
    is_whole: bool = False
    """Whether the manifest is there too."""


class CheckpointStorage:
    """Every call blocks. Calls for different folders may be made at the same time."""

    def __init__(self, url: str, *, max_cache_bytes: int):
        self._storage, self._max_cache_bytes = ObjectStorage(url), max_cache_bytes
        self._locks = [Lock() for _ in range(LOCKS)]
        """Two calls for one folder take turns, by the lock that belongs to its name."""

    def claim(self, owner: str) -> None:
        self._storage.claim(owner)

    def upload(self, folder: Path) -> None:
        """Stores a folder. Files that are there from an earlier try are not sent again. What is stored wholly, by
        another server perhaps, takes the place of the folder if it differs. Raises ObjectLost if the checkpoint is
        neither here nor there, and StorageError if the storage cannot be reached."""
        with self._lock(folder):
            note = _read_note(folder)
            if note.is_whole:
                return
            files = _files_in(folder)
            manifest = self._manifest(folder)
            if manifest is not None:
                if manifest.files != files:
                    self._get(folder, manifest)
                _write_note(folder, UploadNote(files=manifest.files, is_whole=True))
                return
            if not files:
                raise ObjectLost(f"{name_of(folder)} is neither on this disk nor in {self._storage.url}")
            for name, stored in files.items():
                if note.files.get(name) != stored:
                    self._storage.put(folder / name, f"{name_of(folder)}/{name}")
                    note.files[name] = stored
                    _write_note(folder, note)
            with tempfile.NamedTemporaryFile() as file:
                file.write(msgspec.json.format(msgspec.json.encode(Manifest(files=files))))
                file.flush()
                self._storage.put(Path(file.name), f"{name_of(folder)}/{MANIFEST}")
            _write_note(folder, UploadNote(files=files, is_whole=True))

    def fetch(self, folder: Path) -> None:
        """Makes sure that a folder is on this disk, whole. Raises ObjectLost if the storage does not have it, and
        StorageError if it cannot be reached."""
        with self._lock(folder):
            if folder.is_dir():
                # The least recently used leave the cache. The time of its last change stays: it tells engines whether
                # they have read this one.
                os.utime(folder, ns=(time.time_ns(), folder.stat().st_mtime_ns))
                return
            manifest = self._manifest(folder)
            if manifest is None:
                raise ObjectLost(f"{self._storage.url} has no checkpoint {name_of(folder)}")
            self._get(folder, manifest)
            _write_note(folder, UploadNote(files=manifest.files, is_whole=True))

    def _manifest(self, folder: Path) -> Manifest | None:
        data = self._storage.read(f"{name_of(folder)}/{MANIFEST}")
        return None if data is None else msgspec.json.decode(data, type=Manifest)

    def _get(self, folder: Path, manifest: Manifest) -> None:
        """Fetches a folder, which replaces the one that is there."""
        with whole_folder(folder) as unfinished:
            for name, stored in manifest.files.items():
                self._storage.get(f"{name_of(folder)}/{name}", unfinished / name, digest=stored.sha256)
            if folder.exists():
                remove_folder(folder)

    def delete(self, name: str) -> None:
        """Deletes a checkpoint, the manifest first: it is gone before its files are."""
        names = self._storage.names(name)
        self._storage.delete(sorted(names, key=lambda one: not one.endswith(f"/{MANIFEST}")))

    def names(self) -> set[str]:
        """Returns the names of all checkpoints, also of those that were not uploaded wholly."""
        return {"/".join(name.split("/")[:DEPTH]) for name in self._storage.names() if name.count("/") >= DEPTH}

    def evict(self, folders: Iterable[Path], needed: Collection[str]) -> None:
        """Deletes folders from this disk that are stored, if all of them take more than the cache may; those that were
        used last stay, and those that are needed here."""
        sizes = {folder: _size(folder) for folder in folders}
        used = sum(sizes.values())
        for folder in sorted(sizes, key=lambda one: one.stat().st_atime):
            if used <= self._max_cache_bytes:
                return
            if str(folder) not in needed and _read_note(folder).is_whole:
                with self._lock(folder):
                    forget_note(folder)
                    remove_folder(folder)
                used -= sizes[folder]

    def is_stored(self, folder: Path) -> bool:
        return _read_note(folder).is_whole

    def _lock(self, folder: Path) -> Lock:
        return self._locks[hash(folder) % LOCKS]


def name_of(folder: str | Path) -> str:
    """The name of a checkpoint's folder below the root, wherever that is."""
    return "/".join(Path(folder).parts[-DEPTH:])


def forget_note(folder: Path) -> None:
    _note_file(folder).unlink(missing_ok=True)


def _note_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.uploaded")


def _read_note(folder: Path) -> UploadNote:
    try:
        return msgspec.json.decode(_note_file(folder).read_bytes(), type=UploadNote)
    except (FileNotFoundError, msgspec.MsgspecError):
        return UploadNote()


def _write_note(folder: Path, note: UploadNote) -> None:
    with replacing(_note_file(folder)) as file:
        file.write(msgspec.json.encode(note))


def _files_in(folder: Path) -> dict[str, StoredFile]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {file.relative_to(folder).as_posix(): StoredFile(file.stat().st_size, sha256_of(file)) for file in files}


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
