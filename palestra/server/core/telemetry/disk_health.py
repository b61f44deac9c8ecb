"""Whether the disks that the server needs are writable, and if not, why.

Owns: the check. Never touches: the answer to a request whose write failed (`errors.not_kept`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from palestra.config.serve import ServeConfig

MIN_FREE_BYTES = 64 << 20  # the size of one file of the journal
PROBE_BYTES = 4096
FRESH_S = 1.0  # any client may ask, and each check is a write


class DiskHealth:
    def __init__(self, folders: Mapping[str, Path]):
        """`folders` are the folders by their description."""
        self._folders = folders
        self._looked_at = -FRESH_S
        self._looking: asyncio.Task[list[str]] | None = None
        self._found: list[str] = []

    @classmethod
    def of(cls, config: ServeConfig) -> DiskHealth:
        """The disks of a server with this config."""
        folders = {"state folder": config.state, "checkpoints": config.checkpoint_folder}
        return cls(folders | ({"database": config.database_file.parent} if config.database_file is not None else {}))

    async def troubles(self) -> list[str]:
        """Returns one line for each folder that is full or cannot be written; empty: all is well."""
        if time.monotonic() - self._looked_at >= FRESH_S:
            if self._looking is None:
                self._looking = asyncio.create_task(asyncio.to_thread(self._look))
            looking = self._looking
            try:
                self._found = await asyncio.shield(looking)
                self._looked_at = time.monotonic()
            finally:
                if looking.done():
                    self._looking = None
        return self._found

    def _look(self) -> list[str]:
        there = {name: _existing(folder) for name, folder in self._folders.items()}
        disks: dict[int, list[str]] = {}
        for name, folder in there.items():
            disks.setdefault(folder.stat().st_dev, []).append(name)
        found = {", ".join(names): _trouble(there[names[0]]) for names in disks.values()}
        return [f"{names}: {trouble}" for names, trouble in found.items() if trouble is not None]


def _existing(folder: Path) -> Path:
    """Returns the nearest existing folder: the folder itself is made when it is needed."""
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())


def _trouble(folder: Path) -> str | None:
    try:
        free = shutil.disk_usage(folder).free
        if free < MIN_FREE_BYTES:
            return f"the disk is full ({free >> 10} KiB free, {MIN_FREE_BYTES >> 10} KiB needed)"
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as e:
        return f"the disk is not writable ({e.strerror})"
    return None
