"""Keys that end while something that was opened with them goes on: it must end, too.

Owns: which keys are valid, as of some seconds ago. Never touches: requests, whose keys `http.auth` looks up itself.
"""

from __future__ import annotations

import time

from palestra.store import Store
from palestra.store.queries.keys import valid_key_ids


class KeyWatch:
    def __init__(self, store: Store):
        self._store = store
        self.uses: dict[int, float] = {}
        """When keys were used last, by their numbers, since the server has started: each of them was valid then."""
        self._valid: set[int] = set()
        self._ended: set[int] = set()

    def is_valid(self, key_id: int) -> bool:
        return key_id in self._valid or (key_id in self.uses and key_id not in self._ended)

    async def read(self) -> set[int]:
        """Reads the keys again, and returns those that were revoked or have expired since the last time."""
        known = self._valid | self.uses.keys()
        self._valid = await self._store.read(lambda c: valid_key_ids(c, time.time()))
        ended = known - self._valid - self._ended
        self._ended |= ended
        return ended
