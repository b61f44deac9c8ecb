"""A run's metrics as columns, kept up to date by reading only what was added to the file.

Owns: which rows count after a resume, in columns of plain numbers, since rows of a long run would take 100 MB. Never
touches: what a metric means.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path

from palestra.runs.record_files import read_added
from palestra.util.json_types import JsonObject

NOT_METRICS = frozenset({"step", "attempt"})
NUMBERS = frozenset({float, int})
MAX_STEP = 1 << 53  # what is larger is no step, and charts could not place it


class MetricTable:
    """Columns of equal length, one entry for each step; NaN where a step has no such metric. `time` is one of them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._forget()

    def _forget(self) -> None:
        self.steps: list[int] = []
        self.columns: dict[str, array[float]] = {}
        self.offset = 0
        """How far the file was read."""
        self._attempt: object = None
        self._inode: int | None = None

    def updated(self) -> MetricTable:
        """This table if the file is as it was, else a newer one: whoever reads this one meanwhile sees no change."""
        try:
            known = self._file.stat()
        except OSError:
            return MetricTable(self._file)
        if known.st_ino == self._inode and known.st_size == self.offset:
            return self
        newer = MetricTable(self._file)
        newer.steps, newer.offset, newer._attempt, newer._inode = [*self.steps], self.offset, self._attempt, self._inode
        newer.columns = {name: column[:] for name, column in self.columns.items()}
        newer.refresh()
        return newer

    def refresh(self) -> None:
        """Reads what the trainer has written since the last call."""
        try:
            known = self._file.stat()
        except OSError:
            self._forget()
            return
        if known.st_ino != self._inode or known.st_size < self.offset:  # another file by the same name
            self._forget()
            self._inode = known.st_ino
        if known.st_size == self.offset:
            return
        rows, self.offset = read_added(self._file, self.offset)
        for row in rows:
            self._add(row)

    @property
    def names(self) -> list[str]:
        """The metrics that have a number anywhere."""
        return sorted(
            name for name, column in self.columns.items() if name != "time" and not all(map(math.isnan, column))
        )

    def column(self, name: str) -> array[float]:
        return self.columns.get(name) or array("d", [math.nan]) * len(self.steps)

    def last(self, name: str) -> float | None:
        """The newest number of a metric."""
        return next((value for value in reversed(self.columns.get(name, ())) if not math.isnan(value)), None)

    def last_step(self, *names: str) -> int | None:
        """The newest step that has any of these metrics."""
        columns = [self.columns[name] for name in names if name in self.columns]
        places = range(len(self.steps) - 1, -1, -1)
        found = (place for place in places if any(not math.isnan(column[place]) for column in columns))
        place = next(found, None)
        return None if place is None else self.steps[place]

    def at(self, place: int) -> dict[str, float]:
        """The metrics of one step."""
        found = {name: column[place] for name, column in self.columns.items() if name != "time"}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def _add(self, row: JsonObject) -> None:
        step = row.get("step")
        if not isinstance(step, int) or abs(step) > MAX_STEP:
            return
        if row.get("attempt") != self._attempt:
            self._attempt = row.get("attempt")
            self._cut(bisect_left(self.steps, step))
        place = bisect_left(self.steps, step)
        if place == len(self.steps):
            self._append(step, row)
            return
        if self.steps[place] != step:
            self.steps.insert(place, step)
            for column in self.columns.values():
                column.insert(place, math.nan)
        for name, value in row.items():
            if name not in NOT_METRICS and value.__class__ in NUMBERS:
                with suppress(OverflowError):  # JSON may have integers that no float can hold
                    self._column(name, len(self.steps))[place] = value

    def _append(self, step: int, row: JsonObject) -> None:
        """Adds the row of a new step, which nearly all are: ten thousand rows of a hundred metrics in half a second."""
        length, columns = len(self.steps), self.columns
        self.steps.append(step)
        for name, value in row.items():
            if value.__class__ in NUMBERS and name not in NOT_METRICS:
                column = columns.get(name)
                try:
                    (column if column is not None else self._column(name, length)).append(value)
                except OverflowError:
                    continue  # as if the row did not have it
        for column in columns.values():
            if len(column) == length:
                column.append(math.nan)

    def _column(self, name: str, length: int) -> array[float]:
        if name not in self.columns:
            self.columns[name] = array("d", [math.nan]) * length
        return self.columns[name]

    def _cut(self, length: int) -> None:
        del self.steps[length:]
        for column in self.columns.values():
            del column[length:]


def read_table(file: Path) -> MetricTable:
    """The metrics of a run as they are now."""
    table = MetricTable(file)
    table.refresh()
    return table
