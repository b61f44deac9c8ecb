"""Counts of the worker, and when they are sent: once a second while there is work, and when it has ended."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

EVERY_S = 1.0


@dataclass(slots=True)
class Counters:
    """Counters since the worker started; named as in `types.engine.Stats`."""

    tokens_trained: int = 0
    tokens_sampled: int = 0
    train_s: float = 0.0
    sample_s: float = 0.0
    train_batches: int = 0
    train_batch_models: int = 0
    sample_steps: int = 0
    sample_rows: int = 0
    optim_steps: int = 0
    snapshots: int = 0

    def count_batch(self, models: int, tokens: int) -> None:
        self.train_batches += 1
        self.train_batch_models += models
        self.tokens_trained += tokens

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class StatsClock:
    def __init__(self) -> None:
        self._said_at = 0.0
        self._owes = False
        """There was work since the last report."""

    def is_due(self, *, worked: bool, has_work: bool) -> bool:
        now = time.monotonic()
        self._owes |= worked
        due = self._owes and (not has_work or now - self._said_at >= EVERY_S)
        if due:
            self._said_at, self._owes = now, has_work
        return due
