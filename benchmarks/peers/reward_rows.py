"""Rows of `time_to_reward`: written one by one, so that a run that was ended goes on where it was."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from palestra.runs.record_files import LineFile, read_lines
from palestra.util.atomic_files import replacing


class Cell(Struct, frozen=True, kw_only=True):
    """One training run of one contender."""

    task: str
    model: str
    device: str
    who: str
    lr: float
    seed: int


class Point(Struct, frozen=True, kw_only=True, tag="point"):
    """An evaluation of a cell."""

    cell: Cell
    step: int
    success: float
    start_s: float
    train_s: float
    sampled: int
    trained: int
    reward: float


class End(Struct, frozen=True, kw_only=True, tag="end"):
    """A cell is done: its last point reached the goal, or it was given up."""

    cell: Cell
    reached: bool


Row = Point | End


class RowFile:
    """Opened by one benchmark at a time. Points of a cell without an end are dropped: it is begun again."""

    def __init__(self, path: Path) -> None:
        rows = [msgspec.convert(row, Row) for row in read_lines(path)]
        ended = {row.cell for row in rows if isinstance(row, End)}
        self.rows: list[Row] = [row for row in rows if row.cell in ended]
        if len(self.rows) < len(rows):
            with replacing(path) as file:
                file.writelines(msgspec.json.encode(row) + b"\n" for row in self.rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(path)

    def is_done(self, cell: Cell) -> bool:
        return any(isinstance(row, End) and row.cell == cell for row in self.rows)

    def append(self, row: Row) -> None:
        self._file.append(msgspec.to_builtins(row))
        self.rows.append(row)

    def close(self) -> None:
        self._file.close()


def points_of(rows: Iterable[Row], cell: Cell) -> list[Point]:
    return [row for row in rows if isinstance(row, Point) and row.cell == cell]


def cells_of(rows: Iterable[Row], **wanted: str | float) -> list[Cell]:
    """Cells that are done, in the order of their ends."""
    done = [row.cell for row in rows if isinstance(row, End)]
    return [cell for cell in done if all(getattr(cell, name) == value for name, value in wanted.items())]


def goal_of(rows: Sequence[Row], cell: Cell) -> Point | None:
    """The point at which a cell reached the goal."""
    reached = any(isinstance(row, End) and row.cell == cell and row.reached for row in rows)
    return points_of(rows, cell)[-1] if reached else None


def best_rate(rows: Sequence[Row], cells: Sequence[Cell]) -> float | None:
    """The learning rate with which most seeds reach the goal, and of those the fastest; None if none does."""

    def rank(rate: float) -> tuple[int, float]:
        goals = [goal_of(rows, cell) for cell in cells if cell.lr == rate]
        seconds = [goal.train_s for goal in goals if goal is not None]
        return -len(seconds), statistics.median(seconds) if seconds else math.inf

    rates = sorted({cell.lr for cell in cells}, key=rank)
    return rates[0] if rates and rank(rates[0])[0] < 0 else None
