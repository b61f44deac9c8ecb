"""Listeners to the progress of a run: a board in a terminal, lines in a log, or none.

Owns: the protocol and the clock of a step's stages. Never touches: terminals.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Protocol

from palestra.runs.advisories import Advisory


class Stage(StrEnum):
    COLLECT = "collect"
    SCORE = "score"
    UPDATE = "update"
    SYNC = "sync"
    EVAL = "eval"


class RunListener(Protocol):
    def stage(self, stage: Stage, done: int, total: int) -> None:
        """Reports the progress of a stage within a step."""
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
    """Measures the seconds of each stage of one step."""

    def __init__(self) -> None:
        self.seconds: dict[Stage, float] = {}
        self._begin = time.monotonic()

    @contextmanager
    def of(self, stage: Stage) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - begin

    @property
    def total(self) -> float:
        return time.monotonic() - self._begin
