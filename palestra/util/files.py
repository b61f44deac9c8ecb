"""Files and folders that are replaced atomically: after a crash they have the old content or the new, never a part of
it.

Owns: writing beside and renaming, in an order that disks keep. Never touches: what is in them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

TEMPORARY = ".partial"
"""Suffix of a name that is not complete yet."""


def sync(path: Path) -> None:
    """A file's content is on the disk when this returns; of a folder, the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(file: Path, *, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file to write, which replaces the named one atomically when it is on disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}{TEMPORARY}")
    try:
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(file.parent)


def remove_folder(folder: Path) -> None:
    """Deletes a folder. Under its name it is whole or gone."""
    left = folder.with_name(f".{folder.name}.{os.getpid()}.old{TEMPORARY}")
    shutil.rmtree(left, ignore_errors=True)
    folder.rename(left)
    sync(folder.parent)
    shutil.rmtree(left)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that takes the name at the end, after everything in it is on the disk."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}{TEMPORARY}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        yield unfinished
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        unfinished.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
