"""The server's work of the last minutes, read from its metrics every two seconds.

Owns: the readings that are kept, rates and quantiles between two of them. Never touches: what is counted (`metrics`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from palestra.server.core.telemetry.metrics import WORKER_COUNTERS, WORKER_GAUGES, Metrics, RequestQueueState

EVERY_S = 2.0
KEPT = 450  # 15 minutes
RATE_S = 10.0  # over which rates are taken
LATENCY_S = 300.0  # over which latencies are taken

COUNTS = {name + "_total": field for field, (name, _) in WORKER_COUNTERS.items()}
GAUGES = {name: field for field, (name, _) in WORKER_GAUGES.items()}
RESTARTS, LOST, UP = "palestra_worker_restarts_total", "palestra_samples_lost_total", "palestra_worker_up"
FINISHED = "palestra_futures_finished_total"
COMPUTE, OVERHEAD = "palestra_compute_seconds_bucket", "palestra_call_overhead_seconds_bucket"
READ = (*COUNTS, *GAUGES, RESTARTS, LOST, UP, FINISHED, COMPUTE, OVERHEAD)

CallName = tuple[str, str]
"""Base model and type of a call."""


class EngineReading(Struct):
    """The metrics of one base model at one time. Counts are since the start of the server."""

    values: dict[str, float] = {}
    """By field of the worker's `Stats`."""
    is_up: bool = False
    restarts: dict[str, int] = {}
    """By reason."""
    samples_lost: int = 0
    waiting: dict[str, int] = {}
    """Calls without a result, by kind: train, sample."""
    oldest_s: dict[str, float] = {}


class CallReading(Struct):
    """The counts of one type of call at one time."""

    outcomes: dict[str, int] = {}
    compute: dict[float, float] = {}
    """Number of calls up to each bound in seconds."""
    overhead: dict[float, float] = {}


class ServerReading(Struct):
    at: float
    """Seconds since the start of the server."""
    engines: dict[str, EngineReading]
    calls: dict[CallName, CallReading]


class Activity:
    def __init__(self, metrics: Metrics, queues: Callable[[], Sequence[RequestQueueState]]) -> None:
        """`queues` returns the calls that wait; it names all engines."""
        self._metrics, self._queues = metrics, queues
        self.started_at = time.time()
        self._started = time.monotonic()
        self.readings: deque[ServerReading] = deque(maxlen=KEPT)

    def read(self) -> ServerReading:
        """Reads the metrics as they are now."""
        now = ServerReading(time.monotonic() - self._started, {}, {})
        for queue in self._queues():
            engine = now.engines.setdefault(queue.base_model, EngineReading())
            engine.waiting[queue.kind], engine.oldest_s[queue.kind] = queue.depth, queue.oldest_s
        for name, labels, value in self._metrics.read(READ):
            engine = now.engines.setdefault(labels["base_model"], EngineReading())
            if (field := COUNTS.get(name) or GAUGES.get(name)) is not None:
                engine.values[field] = value
            elif name == UP:
                engine.is_up = value > 0
            elif name == RESTARTS:
                engine.restarts[labels["reason"]] = int(value)
            elif name == LOST:
                engine.samples_lost = int(value)
            else:
                _note_call(now, name, labels, value)
        return now

    async def record_often(self) -> None:
        while True:
            self.readings.append(self.read())
            await asyncio.sleep(EVERY_S)

    def before(self, seconds: float) -> ServerReading | None:
        """The reading this long before the newest one, or the oldest that is kept; None with fewer than two."""
        if len(self.readings) < 2:
            return None
        border = self.readings[-1].at - seconds
        return next(one for one in self.readings if one.at >= border or one is self.readings[-2])


def rate(old: ServerReading, new: ServerReading, engine: str, field: str) -> float:
    """Returns how much a count has grown each second between two readings."""
    before, after = (one.engines.get(engine, EngineReading()).values.get(field, 0.0) for one in (old, new))
    return max(0.0, after - before) / max(1e-3, new.at - old.at)


def quantile(counts: dict[float, float], share: float) -> float | None:
    """The value below which this share of the calls lies, interpolated in its bucket; None without calls."""
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return None
    low, below = 0.0, 0.0
    for bound, count in sorted(counts.items()):
        if count >= share * total:
            inside = (share * total - below) / (count - below) if count > below else 1.0
            return low if bound == float("inf") else low + (bound - low) * inside
        low, below = bound, count
    return None


def grown(old: dict[float, float], new: dict[float, float]) -> dict[float, float]:
    return {bound: count - old.get(bound, 0.0) for bound, count in new.items()}


def _note_call(reading: ServerReading, name: str, labels: dict[str, str], value: float) -> None:
    call = reading.calls.setdefault((labels["base_model"], labels.get("type", "")), CallReading())
    if name == FINISHED:
        call.outcomes[labels["outcome"]] = int(value)
    elif name == COMPUTE:
        call.compute[float(labels["le"])] = value
    elif name == OVERHEAD:
        call.overhead[float(labels["le"])] = value
