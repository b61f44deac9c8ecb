"""Listeners to the progress of a run: a board in a terminal, lines in a log, or none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Protocol

from palestra.runs.advisories import Advisory


class Stage(StrEnum):
    START = "start"
    """All that comes before the first step: the server, the model, the adapter."""
    COLLECT = "collect"
    SCORE = "score"
    UPDATE = "update"
    GUARD = "guard"
    """Measures how far an update moves the policy, before and after it."""
    SYNC = "sync"
    EVAL = "eval"
    SAVE = "save"
    END = "end"
    """What is left after the last step: the last weights are published, and the server is closed."""


class RunListener(Protocol):
    def stage(self, stage: Stage, done: int, total: int) -> None:
        """Reports the progress of a stage; `total` is 0 for one that counts nothing."""
        ...

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Reports that a step is over."""
        ...

    def evaluated(self, step: int, metrics: dict[str, float]) -> None: ...

    def note(self, text: str) -> None:
        """Reports something that a person should know."""
        ...

    def advise(self, advisory: Advisory) -> None:
        """Reports that something goes wrong, once for each kind of advisory."""
        ...


class Silence:
    """Ignores all reports. Who listens to notes hears advisories as notes."""

    def stage(self, stage: Stage, done: int, total: int) -> None: ...

    def step(self, step: int, metrics: dict[str, float]) -> None: ...

    def evaluated(self, step: int, metrics: dict[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def advise(self, advisory: Advisory) -> None:
        self.note(advisory.warning)


class StageClock:
    """Measures the seconds of each stage of one step, and reports where each begins."""

    def __init__(self, listener: RunListener) -> None:
        self._listener = listener
        self.seconds: dict[Stage, float] = {}
        self._begin = time.monotonic()

    @contextmanager
    def of(self, stage: Stage, total: int = 0) -> Iterator[None]:
        """`total`: what the stage has to do; without it, the stage counts nothing or reports its progress itself."""
        begin = time.monotonic()
        self._listener.stage(stage, 0, total)
        try:
            yield
            if total:
                self._listener.stage(stage, total, total)
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - begin

    @property
    def total(self) -> float:
        return time.monotonic() - self._begin
