"""Pauses before another try."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import count

LONGEST_ASKED_S = 60.0  # whoever asks for more is asked again after this
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


def retry_after_s(header: str | None) -> float:
    """Returns the pause that a server asks for by the header Retry-After, in seconds or as a date; 0 if there is
    none."""
    try:
        seconds = float(header or 0)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(str(header)).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return 0.0 if math.isnan(seconds) else min(max(seconds, 0.0), LONGEST_ASKED_S)
