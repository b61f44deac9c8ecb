"""Counts the calls of a server, for those who watch a gym."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from palestra.types.gym_calls import PathCalls, ServerCalls

WINDOW_S = 60
MAX_PATHS = 50
OTHERS = "/…"
"""Counts the calls of all paths beyond the most that are counted apart."""


class RecentCount:
    """Events of the last minute, counted by second."""

    __slots__ = ("_counts", "_seconds")

    def __init__(self) -> None:
        self._counts, self._seconds = [0] * WINDOW_S, [-1] * WINDOW_S

    def add(self, now: float) -> None:
        second = int(now)
        place = second % WINDOW_S
        if self._seconds[place] != second:
            self._seconds[place], self._counts[place] = second, 0
        self._counts[place] += 1

    def total(self, now: float) -> int:
        first = int(now) - WINDOW_S
        return sum(n for n, second in zip(self._counts, self._seconds, strict=True) if second > first)


@dataclass(slots=True)
class PathCount:
    calls: int = 0
    failed: int = 0
    running: int = 0
    seconds: float = 0.0
    recent: RecentCount = field(default_factory=RecentCount)
    recent_failed: RecentCount = field(default_factory=RecentCount)


class CallCounts:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._since = clock()
        self._paths: dict[str, PathCount] = {}
        self._failures: Counter[str] = Counter()

    def begin(self, path: str) -> PathCount:
        found = self._paths.get(path)
        if found is None:
            path = path if len(self._paths) < MAX_PATHS else OTHERS
            found = self._paths.setdefault(path, PathCount())
        found.running += 1
        return found

    def end(self, count: PathCount, seconds: float, failure: str | None) -> None:
        """`failure` is its class or HTTP status; None: the call was answered."""
        now = self._clock()
        count.running -= 1
        count.calls += 1
        count.seconds += seconds
        count.recent.add(now)
        if failure is not None:
            count.failed += 1
            count.recent_failed.add(now)
            self._failures[failure] += 1

    def read(self) -> ServerCalls:
        now = self._clock()
        window_s = max(1.0, min(WINDOW_S, now - self._since))
        paths = [_read(path, count, now, window_s) for path, count in sorted(self._paths.items())]
        return ServerCalls(since=self._since, paths=paths, failures=dict(self._failures))


def _read(path: str, count: PathCount, now: float, window_s: float) -> PathCalls:
    return PathCalls(
        path=path,
        calls=count.calls,
        failed=count.failed,
        running=count.running,
        per_s=count.recent.total(now) / window_s,
        failed_per_s=count.recent_failed.total(now) / window_s,
        mean_s=count.seconds / count.calls if count.calls else None,
    )
