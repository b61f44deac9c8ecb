"""Notices a worker that runs but makes no progress: never ready, silent, or stuck in one computation.

Owns: timers of one worker, the meaning of its heartbeats. Never touches: the process, which `bite` ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import structlog

from palestra.types.engine import WorkerHeartbeat

log = structlog.get_logger()

LOOKS = 3  # checks in a row without a heartbeat between them
STUCK_BEATS = 2  # a single one may come from a machine that slept in the middle of a computation


class RestartReason(StrEnum):
    """Why a worker had to be restarted."""

    DIED = "died"
    NOT_READY = "not_ready"
    SILENT = "silent"
    STUCK = "stuck"
    MOVED = "moved"
    """Its node is being emptied."""


@dataclass(frozen=True, slots=True)
class WatchdogTimeouts:
    """How long to wait for a worker; 0: for ever."""

    start_s: float
    silence_s: float
    stall_s: float


class Watchdog:
    def __init__(self, patience: WatchdogTimeouts, bite: Callable[[RestartReason], None]):
        self.patience, self._bite = patience, bite
        self._timer: asyncio.TimerHandle | None = None
        self._looks = self._stuck_beats = 0

    def on_spawn(self) -> None:
        self._arm(self.patience.start_s, lambda: self._bite(RestartReason.NOT_READY))

    def on_hello(self) -> None:
        self._looks = self._stuck_beats = 0
        self._arm(self.patience.silence_s / LOOKS, self._look)

    def on_exit(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def on_beat(self, beat: WorkerHeartbeat) -> None:
        self._looks = 0
        is_stuck = 0 < self.patience.stall_s < beat.busy_s
        self._stuck_beats = self._stuck_beats + 1 if is_stuck else 0
        if self._stuck_beats == STUCK_BEATS:
            log.error("the worker's compute loop is stuck", doing=beat.doing, for_s=round(beat.busy_s))
            self._bite(RestartReason.STUCK)

    def _look(self) -> None:
        """Counts checks rather than seconds: if this process was stopped too, as on a machine that slept, all that time
        is one check, and the worker's next heartbeat comes before the others."""
        self._looks += 1
        if self._looks > LOOKS:
            self._bite(RestartReason.SILENT)
        else:
            self._arm(self.patience.silence_s / LOOKS, self._look)

    def _arm(self, after_s: float, do: Callable[[], None]) -> None:
        self.on_exit()
        if after_s > 0:
            self._timer = asyncio.get_running_loop().call_later(after_s, do)
