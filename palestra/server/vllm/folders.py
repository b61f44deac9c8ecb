"""Folders of adapters that vLLM samples from and that are not part of a checkpoint.

A folder is deleted some time after its sampler, because vLLM reads it again after it has unloaded the adapter. Owns:
these folders. Never touches: what is in them; the engine writes it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote

import structlog

log = structlog.get_logger()

KEEP_S = 120.0


class AdapterFolders:
    def __init__(self, root: Path, is_live: Callable[[str], bool]):
        self.root, self._is_live = root, is_live
        self._gone: dict[Path, float] = {}
        """Folders without a sampler, and when that was first noticed."""

    def of(self, sampler_id: str) -> Path:
        return self.root / quote(sampler_id, safe="")

    def sweep(self) -> None:
        """Deletes folders without a sampler. This includes what a dead process left half written, because it has no
        sampler's name."""
        now = time.time()
        for folder in self.root.iterdir() if self.root.is_dir() else ():
            if self._is_live(unquote(folder.name)):
                self._gone.pop(folder, None)
            elif now - self._gone.setdefault(folder, now) > KEEP_S:
                log.info("removing an adapter", folder=str(folder))
                shutil.rmtree(folder, ignore_errors=True)
                del self._gone[folder]
