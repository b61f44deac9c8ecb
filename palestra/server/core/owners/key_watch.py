"""Keys that end while something that was opened with them goes on: it must end, too.

Owns: which keys are valid, as of some seconds ago. Never touches: requests, whose keys `http.auth` looks up itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from palestra.store import Store
from palestra.store.queries.keys import valid_key_ids


class KeyWatch:
    def __init__(self, store: Store, uses: Mapping[int, float]):
        self._store, self._uses = store, uses
        """`uses` has the keys that were used since the server has started: each of them was valid then."""
        self._valid: set[int] = set()
        self._ended: set[int] = set()
        self.on_end: list[Callable[[set[int]], None]] = []
        """Called with the numbers of keys that were revoked or have expired."""

    def is_valid(self, key_id: int) -> bool:
        return key_id in self._valid or (key_id in self._uses and key_id not in self._ended)

    async def read(self) -> None:
        """Reads the keys again, and reports those that have ended."""
        known = self._valid | self._uses.keys()
        self._valid = await self._store.read(lambda c: valid_key_ids(c, time.time()))
        if ended := known - self._valid - self._ended:
            self._ended |= ended
            for tell in self.on_end:
                tell(ended)
