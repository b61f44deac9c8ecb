"""The clock of leases: seconds since the epoch, but without jumps."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.25  # the clock is read at least this often
# the most that counts between two readings: if more, this process did not run, and no client could reach it
MOST_S = 1.0


class Clock:
    """The wall clock when the server started, and from there a monotonic one. Setting the system's clock changes
    nothing. Time in which this process did not run (a laptop asleep, a stopped machine) does not count, because no
    client could send a heartbeat meanwhile."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic):
        self._wall, self._monotonic = wall, monotonic
        self.latest, self._looked = wall(), monotonic()
        """The time that was returned last."""

    def now(self) -> float:
        looked = self._monotonic()
        passed, self._looked = looked - self._looked, looked
        self.latest += min(MOST_S, passed)
        return self.latest

    def behind_s(self) -> float:
        """Returns how far this clock is behind the wall clock, which all others use."""
        return self._wall() - self.now()

    def begin_after(self, moment: float) -> None:
        """Makes the clock start after this moment, which was stored before this server started: the system's clock may
        have been set back since."""
        self.latest = max(self.latest, moment)
