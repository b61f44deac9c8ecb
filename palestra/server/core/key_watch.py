"""Keys that end while something that was opened with them goes on: it must end, too.

Owns: which keys are valid, as of some seconds ago. Never touches: requests, whose keys `http.auth` looks up itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from palestra.store import Store
from palestra.store.keys import valid_key_ids


class KeyWatch:
    def __init__(self, store: Store):
        self._store = store
        self._valid: set[int] = set()
        self.on_end: list[Callable[[set[int]], None]] = []
        """Called with the numbers of keys that were revoked or have expired."""

    def note(self, key_id: int) -> None:
        """Notes a key that was valid just now."""
        self._valid.add(key_id)

    def is_valid(self, key_id: int) -> bool:
        return key_id in self._valid

    async def read(self) -> None:
        """Reads the keys again, and reports those that have ended."""
        before = set(self._valid)
        valid = await self._store.read(lambda c: valid_key_ids(c, time.time()))
        self._valid = valid | (self._valid - before)  # and those that were noted meanwhile
        if ended := before - valid:
            for tell in self.on_end:
                tell(ended)
