"""Rollouts of steps without their conversations, kept as bytes, so that it is known how much memory they take."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path


class StepCache:
    """Caches what was made of files, until they change; drops the least recently used first."""

    def __init__(self, most_bytes: int) -> None:
        self.size_bytes = 0
        self._most_bytes = most_bytes
        self._kept: OrderedDict[Path, tuple[tuple[int, int], bytes]] = OrderedDict()
        self._lock = threading.Lock()
        """Protects what is kept: requests are answered in threads."""

    def get(self, file: Path, make: Callable[[Path], bytes]) -> bytes:
        known = file.stat()
        state = known.st_mtime_ns, known.st_size
        with self._lock:
            kept = self._kept.get(file)
            if kept is not None and kept[0] == state:
                self._kept.move_to_end(file)
                return kept[1]
        made = make(file)
        with self._lock:
            self._leave(file)
            if len(made) > self._most_bytes:
                return made
            self._kept[file] = state, made
            self.size_bytes += len(made)
            while self.size_bytes > self._most_bytes:
                self._leave(next(iter(self._kept)))
        return made

    def _leave(self, file: Path) -> None:
        if (kept := self._kept.pop(file, None)) is not None:
            self.size_bytes -= len(kept[1])
