"""Pictures of a run's rollouts: files in its folder, each once, named by the SHA-256 of its content."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from palestra.types.pictures import PictureFile
from palestra.types.rollouts import Rollout
from palestra.util.atomic_files import replacing

PICTURES = "pictures"
"""Folder within a run's."""
DIGEST = re.compile(r"[0-9a-f]{64}")


def write_pictures(run: Path, rollouts: Iterable[Rollout]) -> None:
    """Writes the files that were not there yet."""
    found = {digest: file for rollout in rollouts for digest, file in rollout.picture_files.items()}
    for digest, file in found.items():
        if not (path := _path(run, digest)).exists():
            _write(path, file)


def read_picture(run: Path, digest: str) -> bytes | None:
    """Reads a picture. None: the run has no such picture."""
    if not DIGEST.fullmatch(digest):
        return None
    try:
        return _path(run, digest).read_bytes()
    except OSError:
        return None


def _write(path: Path, file: PictureFile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as out:
        out.write(file.data)


def _path(run: Path, digest: str) -> Path:
    return run / PICTURES / digest[:2] / digest
