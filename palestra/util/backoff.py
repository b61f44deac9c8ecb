"""How long to wait before another try.

Owns: the lengths of pauses. Never touches: when to give up, which each caller decides.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

MOST_DOUBLINGS = 60  # beyond any limit, and still a finite number


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double after each failure in a row."""

    first_s: float
    longest_s: float
    spread: float = 0.0
    """The share by which a pause may be shorter, at random: those who failed together do not come back together."""

    def after(self, failures: int) -> float:
        """Returns the pause after this number of failures in a row."""
        pause_s = min(self.first_s * 2.0 ** min(max(failures - 1, 0), MOST_DOUBLINGS), self.longest_s)
        return pause_s * random.uniform(1 - self.spread, 1.0)

    def pauses(self) -> Iterator[float]:
        """The pauses after the first failure, the second and so on, without end."""
        return map(self.after, count(1))
