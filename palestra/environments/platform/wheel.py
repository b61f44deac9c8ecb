"""When things are due: a wheel of seconds, so that a look at it costs what is due and not what there is.

Owns: slots. Never touches: what is done about it.
"""

from __future__ import annotations

import math


class Wheel:
    def __init__(self, now: float) -> None:
        self._slots: dict[int, list[str]] = {}
        self._next = math.floor(now)
        """The first second nobody has looked at."""

    def put(self, key: str, at: float) -> int:
        """Which slot it went to. Whoever puts it again remembers the newest: the older one means nothing then."""
        slot = max(math.ceil(at), self._next)
        self._slots.setdefault(slot, []).append(key)
        return slot

    def due(self, now: float) -> list[tuple[str, int]]:
        """Taken out, with their slots. A clock that was put back finds nothing until it has caught up."""
        found: list[tuple[str, int]] = []
        for slot in range(self._next, math.floor(now) + 1):
            found += [(key, slot) for key in self._slots.pop(slot, ())]
        self._next = max(self._next, math.floor(now) + 1)
        return found
