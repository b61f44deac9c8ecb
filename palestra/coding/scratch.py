"""Folders for copies of agents' work while it is judged. What a killed process leaves, the next one removes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from palestra.sandbox.owned_folders import OwnedFolder, abandoned

KIND = "verify"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    _remove_abandoned()
    folder = OwnedFolder(KIND)
    try:
        yield folder.path
    finally:
        folder.remove()


@cache
def _remove_abandoned() -> None:
    """Removes abandoned folders, once in a process."""
    for folder in abandoned(KIND):
        shutil.rmtree(folder, ignore_errors=True)
