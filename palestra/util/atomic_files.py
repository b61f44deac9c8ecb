"""Files and folders that are replaced atomically: after a crash they have the old content or the new, never a part of
it.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

TEMPORARY = ".partial"
"""Suffix of a name that is not complete yet."""
WITHOUT_NAME = (errno.ENOSPC, errno.EDQUOT)
"""Errors of writes to open files, which do not know their names."""
NUMBER_IN_TEXT = re.compile(r"(os error |\[Errno )(?P<number>[0-9]+)")
"""How exceptions have an error's number in their text only: of safetensors, of shutil.copytree."""


def sync(path: Path) -> None:
    """A file's content is on the disk when this returns; of a folder, the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Makes the error of a full disk name this file or folder, which is written inside."""
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        if number is None and (found := NUMBER_IN_TEXT.search(str(error))):
            number = int(found["number"])
        if number not in WITHOUT_NAME or getattr(error, "filename", None) is not None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


@contextmanager
def replacing(file: Path, *, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file to write, which replaces the named one atomically when it is on disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}{TEMPORARY}")
    try:
        with (
            naming(file),
            os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as stream,
        ):
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
    with folder_beside(folder) as unfinished:
        yield unfinished
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        unfinished.rename(folder)
        sync(folder.parent)


def remove_unfinished(path: Path) -> None:
    """Deletes temporary files and folders of this name whose processes, of this machine, were killed."""
    import psutil

    for left in path.parent.glob(f".{glob.escape(path.name)}.*{TEMPORARY}"):
        owner = left.name.removesuffix(TEMPORARY).rpartition(".")[2]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def folder_beside(path: Path, *, mode: int = 0o777) -> Iterator[Path]:
    """A temporary folder on the disk of the file or folder that is to be made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode)
    try:
        with naming(path):
            yield unfinished
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
