"""The clock of leases: seconds since the epoch, but without jumps.

Owns: the broker's time. Never touches: leases.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.25  # somebody looks at the clock this often, whatever happens
MOST_S = 1.0  # that can be between two looks: beyond it this process did not run, and nobody could be heard


class Clock:
    """The wall clock when the server started, and from there a monotonic one. Setting the system's clock changes
    nothing. Time in which this process did not run (a laptop asleep, a machine that was stopped) does not count: no
    client could beat meanwhile."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic):
        self._wall, self._monotonic = wall, monotonic
        self.latest, self._looked = wall(), monotonic()
        """What was told last."""

    def now(self) -> float:
        looked = self._monotonic()
        passed, self._looked = looked - self._looked, looked
        self.latest += min(MOST_S, passed)
        return self.latest

    def behind_s(self) -> float:
        """The wall clock, by which all others go: what did not count, or how far that one was set."""
        return self._wall() - self.now()

    def begin_after(self, moment: float) -> None:
        """What was noted before this server started: its clock may have been set back since."""
        self.latest = max(self.latest, moment)
