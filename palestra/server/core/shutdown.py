"""Whether the server is being stopped.

Owns: the fact. Never touches: those who wait, whom `services` wakes.
"""

from __future__ import annotations


class Shutdown:
    def __init__(self, poll_hold_s: float):
        self.has_begun = False
        self._poll_hold_s = poll_hold_s

    def begin(self) -> None:
        self.has_begun = True

    @property
    def poll_hold_s(self) -> float:
        """Seconds that a poll may wait for a result. One that was answered because the server stops comes again at
        once."""
        return 0.0 if self.has_begun else self._poll_hold_s
