"""A run's metrics as columns, kept up to date by reading only what was added to the file.

Owns: which rows count after a resume, in columns of plain numbers, since rows of a long run would take 100 MB. Never
touches: what a metric means.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from pathlib import Path

from palestra.runs.record_files import read_added
from palestra.util.json_types import JsonObject

NOT_METRICS = frozenset({"step", "attempt"})
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
        if place == len(self.steps) or self.steps[place] != step:
            self.steps.insert(place, step)
            for column in self.columns.values():
                column.insert(place, math.nan)
        for name, value in row.items():
            if name in NOT_METRICS or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name not in self.columns:
                self.columns[name] = array("d", [math.nan]) * len(self.steps)
            self.columns[name][place] = _double(value)

    def _cut(self, length: int) -> None:
        del self.steps[length:]
        for column in self.columns.values():
            del column[length:]


def _double(value: float) -> float:
    """The number as a column keeps it; JSON may have integers that no float can hold."""
    try:
        return float(value)
    except OverflowError:
        return math.nan
