"""A run's metrics as columns, kept up to date by reading only what was added to the file."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import cast

import msgspec
from msgspec import Struct

from palestra.runs.record_files import read_added_blocks
from palestra.util.json_types import JsonObject

NOT_METRICS = frozenset({"step", "attempt"})
NUMBERS = frozenset({float, int})
END_BYTES = 256
MAX_STEP = 1 << 53  # what is larger is no step, and charts could not place it
BESIDE_EVALUATIONS = NOT_METRICS | {"time", "time/eval_s"}


class _SavedTable(Struct, frozen=True):
    offset: int
    end: bytes
    """The last bytes of the file that are in the table, by which it is known again."""
    attempt: object
    steps: bytes
    columns: dict[str, bytes]


ENCODER, DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_SavedTable)


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

    def saved(self) -> bytes:
        """The table as bytes, from which `restore` makes it again without reading what is in it."""
        is_same = self._file.stat().st_ino == self._inode
        end = _end_of(self._file, self.offset) if is_same else b""
        columns = {name: column.tobytes() for name, column in self.columns.items()}
        return ENCODER.encode(_SavedTable(self.offset, end, self._attempt, array("q", self.steps).tobytes(), columns))

    @classmethod
    def restore(cls, file: Path, saved: bytes) -> MetricTable:
        """The table that was saved, if the file is still that one or has grown; else an empty one."""
        table = cls(file)
        try:
            found = DECODER.decode(saved)
            if not found.end or _end_of(file, found.offset) != found.end:
                return table
            table._inode = file.stat().st_ino
        except (msgspec.DecodeError, OSError):
            return table
        table.offset, table._attempt = found.offset, found.attempt
        table.steps = array("q", found.steps).tolist()
        table.columns = {name: array("d", column) for name, column in found.columns.items()}
        return table

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
        for rows, end in read_added_blocks(self._file, self.offset):
            self._add_rows(rows)
            self.offset = end

    @property
    def names(self) -> list[str]:
        """The metrics that have a number anywhere."""
        return sorted(
            name for name, column in self.columns.items() if name != "time" and not all(map(math.isnan, column))
        )

    @property
    def size_bytes(self) -> int:
        return 8 * len(self.steps) * (1 + len(self.columns))

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

    def _add_rows(self, rows: list[JsonObject]) -> None:
        """Adds rows in their order. Those that only go on where the table ends, which nearly all do, are added column
        by column."""
        new: list[JsonObject] = []
        last = self.steps[-1] if self.steps else -MAX_STEP
        for row in rows:
            step = row.get("step")
            if type(step) is int and last < step <= MAX_STEP and row.get("attempt") == self._attempt:
                new.append(row)
                last = step
            else:
                self._extend(new)
                new = []
                self._add(row)
                last = self.steps[-1] if self.steps else -MAX_STEP
        self._extend(new)

    def _extend(self, rows: list[JsonObject]) -> None:
        length = len(self.steps)
        self.steps += [row["step"] for row in rows]
        for name, values in _transposed(rows):
            kinds = {*map(type, values)}
            if kinds & NUMBERS and name not in NOT_METRICS:
                self._column(name, length).extend(_numbers(values, kinds))
        for column in self.columns.values():
            column.extend([math.nan] * (len(self.steps) - len(column)))

    def _add(self, row: JsonObject) -> None:
        """Adds one row, wherever it belongs."""
        step = row.get("step")
        if not isinstance(step, int) or abs(step) > MAX_STEP:
            return
        if row.get("attempt") != self._attempt:
            self._attempt = row.get("attempt")
            self._cut((bisect_right if is_evaluation(row) else bisect_left)(self.steps, step))
        place = bisect_left(self.steps, step)
        if self.steps[place : place + 1] != [step]:
            self.steps.insert(place, step)
            for column in self.columns.values():
                column.insert(place, math.nan)
        for name, value in row.items():
            if name not in NOT_METRICS and value.__class__ in NUMBERS:
                with suppress(OverflowError):  # JSON may have integers that no float can hold
                    self._column(name, len(self.steps))[place] = value

    def _column(self, name: str, length: int) -> array[float]:
        if name not in self.columns:
            self.columns[name] = array("d", [math.nan]) * length
        return self.columns[name]

    def _cut(self, length: int) -> None:
        del self.steps[length:]
        for column in self.columns.values():
            del column[length:]


def is_evaluation(row: Mapping[str, object]) -> bool:
    """Whether a row has the metrics of an evaluation alone. A resumed attempt that begins with one was killed after the
    checkpoint of that step and before its evaluation: what was trained in the step still counts."""
    return all(name.startswith("eval/") or name in BESIDE_EVALUATIONS for name in row)


def _end_of(file: Path, offset: int) -> bytes:
    """The bytes of the file before an offset."""
    begin = max(0, offset - END_BYTES)
    with file.open("rb") as stream:
        stream.seek(begin)
        return stream.read(offset - begin)


def _transposed(rows: list[JsonObject]) -> Iterable[tuple[str, Sequence[object]]]:
    """The values of each name, NaN where a row has none."""
    names = list(rows[0]) if rows else []
    if all([*row] == names for row in rows):
        return zip(names, zip(*[row.values() for row in rows], strict=True), strict=True)
    return ((name, [row.get(name, math.nan) for row in rows]) for name in sorted({*chain.from_iterable(rows)}))


def _numbers(values: Sequence[object], kinds: set[type]) -> array[float]:
    """The values as numbers; NaN for those that are none, or that no float can hold."""
    if kinds <= NUMBERS:
        with suppress(OverflowError):
            return array("d", cast("Sequence[float]", values))
    return array("d", map(_number, values))


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, float | int) and value.__class__ is not bool else math.nan
    except OverflowError:  # JSON may have integers of any length
        return math.nan


def read_table(file: Path) -> MetricTable:
    """The metrics of a run as they are now."""
    table = MetricTable(file)
    table.refresh()
    return table
