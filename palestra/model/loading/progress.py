"""Reports how far the loading of a model is: log lines with GB and GB/s."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

LOG_EVERY_S = 2.0
BAR = 20


class LoadProgress:
    """Says nothing about loads that take less than two seconds."""

    def __init__(self, total_bytes: int, what: str = "loading_weights"):
        self.total, self.done, self.what = total_bytes, 0, what
        self._began = self._logged = time.monotonic()

    def add(self, size_bytes: int) -> None:
        self.done += size_bytes
        now = time.monotonic()
        if now > self._logged + LOG_EVERY_S:
            self._logged = now
            share = min(1.0, self.done / self.total)
            bar = ("#" * int(share * BAR)).ljust(BAR, ".")
            log.info("%s [%s] %d%% %s", self.what, bar, 100 * share, self._rate(now))

    def end(self) -> None:
        now = time.monotonic()
        if now > self._began + LOG_EVERY_S:
            log.info("%s done seconds=%.1f %s", self.what, now - self._began, self._rate(now))

    def _rate(self, now: float) -> str:
        seconds = max(now - self._began, 1e-9)
        return f"gb={self.done / 1e9:.1f} of={self.total / 1e9:.1f} gb_per_s={self.done / 1e9 / seconds:.2f}"
