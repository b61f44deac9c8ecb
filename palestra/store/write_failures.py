"""Counts for how long writes have been failing, one after another."""

from __future__ import annotations

import math
import time

PAUSE_S = 60.0  # failures further apart than this are counted separately; clients try again every 30 s


class WriteFailures:
    def __init__(self, patience_s: float):
        self._patience_s = patience_s
        self._since = self._last = -math.inf

    def failed(self) -> bool:
        """Notes a failure. Returns whether nothing could be written for longer than the patience."""
        now = time.monotonic()
        if now - self._last > PAUSE_S:
            self._since = now
        self._last = now
        return now - self._since >= self._patience_s

    def worked(self) -> None:
        self._last = -math.inf
