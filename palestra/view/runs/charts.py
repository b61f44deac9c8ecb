"""A run's charts as numbers: lines over one x-axis, with as many points as a screen can show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from palestra.runs.metric_table import MetricTable
from palestra.view.runs.downsampling import Floats, pick_points
from palestra.view.runs.metric_descriptions import MetricDescription, explain
from palestra.view.runs.panels import ROWS, ChartPanel, matching

TOKENS = ("batch/sampled_tokens", "batch/trained_tokens", "batch/tokens")
"""What the x-axis `tokens` adds up: the first of these that a run has."""
MAX_LINES = 12  # more cannot be told apart in one chart


class Axis(StrEnum):
    STEP = "step"
    TIME = "time"
    """Seconds since the first row of metrics."""
    TOKENS = "tokens"
    """Tokens that were learned from, added up."""


class Line(Struct, frozen=True):
    name: str
    label: str
    description: MetricDescription | None
    values: list[float | None]


class Series(Struct, frozen=True):
    """Lines over the same points."""

    x: list[float]
    steps: list[int]
    """The step of each point."""
    lines: list[Line]
    is_sampled: bool
    """Whether points were left out."""


class Chart(Struct, frozen=True):
    title: str
    series: Series
    band: list[Line]
    """The lower and the upper edge, or nothing."""
    is_stacked: bool
    is_share: bool


class ChartRow(Struct, frozen=True):
    title: str
    question: str
    charts: list[Chart]


class Board(Struct, frozen=True):
    """All charts of a run."""

    axis: Axis
    rows: list[ChartRow]
    others: list[str]
    """Metrics that are in none of the charts."""
    last_step: int | None
    position: int
    """Place at which the live stream continues."""
    names: list[str] = []
    """All metrics there are, drawn or not."""
    zeros: list[str] = []
    """Metrics that were never anything but 0, which some charts leave out."""


class Window(Struct, frozen=True):
    """What is asked for: an axis, the part of it, and the number of points."""

    axis: Axis = Axis.STEP
    low: float = -math.inf
    high: float = math.inf
    points: int = 1000


def read_board(table: MetricTable, window: Window) -> Board:
    names, used, rows = table.names, set(), []
    for row in ROWS:
        charts = []
        for panel in row.panels:
            lines = matching(panel.lines, names)
            if chart := _chart(table, panel, lines, window):
                used |= {*lines, *(panel.band or ())}
                charts.append(chart)
        if charts:
            rows.append(ChartRow(row.title, row.question, charts))
    others = [name for name in names if name not in used]
    zeros = [name for name in names if not any(value and not math.isnan(value) for value in table.column(name))]
    last = table.steps[-1] if table.steps else None
    return Board(window.axis, rows, others, last, table.offset, names=names, zeros=zeros)


def _chart(table: MetricTable, panel: ChartPanel, lines: Sequence[str], window: Window) -> Chart | None:
    if panel.hides_zeros:
        lines = [name for name in lines if any(value and not math.isnan(value) for value in table.column(name))]
    lines = _different(table, lines)[:MAX_LINES]
    if len(lines) < panel.least_lines:
        return None
    edges = [name for name in panel.band or () if name in table.columns]
    series = read_series(table, [*lines, *edges], window)
    band = series.lines[len(lines) :] if len(edges) == 2 else []
    series = Series(series.x, series.steps, series.lines[: len(lines)], series.is_sampled)
    is_share = panel.is_share and all(
        0 <= value <= 1 for line in series.lines for value in line.values if value is not None
    )
    return Chart(panel.title, series, band, panel.is_stacked, is_share)


def _different(table: MetricTable, names: Sequence[str]) -> list[str]:
    """The metrics without those that repeat another, as pass@1 repeats the success."""
    found: dict[bytes, str] = {}
    for name in names:
        found.setdefault(table.column(name).tobytes(), name)
    return list(found.values())


def read_series(table: MetricTable, names: Sequence[str], window: Window) -> Series:
    """The metrics over one axis. Points that none of them has are left out, and of the others those that matter least
    to the look of every line."""
    xs = axis_values(table, window.axis)
    columns = [np.asarray(table.column(name)) for name in names]
    has_number = [~np.isnan(column) for column in columns]
    inside = (window.low <= xs) & (xs <= window.high) & np.logical_or.reduce(has_number, initial=False)
    count = int(np.count_nonzero(inside))
    if count <= window.points:
        places = np.flatnonzero(inside)
    else:
        share = max(3, window.points // max(1, len(names)))
        places = np.unique(np.concatenate([_looks(xs, column, inside, share) for column in columns]))
    return Series(
        x=xs[places].tolist(),
        steps=[table.steps[place] for place in places.tolist()],
        lines=[
            Line(name, label, explain(name), _numbers(column[places]))
            for name, label, column in zip(names, short_labels(names), columns, strict=True)
        ],
        is_sampled=len(places) < count,
    )


def _looks(xs: Floats, column: Floats, inside: NDArray[np.bool_], count: int) -> NDArray[np.intp]:
    """Places of the points that matter most to the look of a line."""
    places = np.flatnonzero(inside & np.isfinite(column))
    return places[pick_points(xs[places], column[places], count)]


def axis_values(table: MetricTable, axis: Axis) -> Floats:
    if axis is Axis.TIME:
        times = np.asarray(table.column("time"))
        known = times[~np.isnan(times)]
        return np.maximum.accumulate(np.nan_to_num(times - (known[0] if len(known) else 0.0), nan=0.0))
    if axis is Axis.TOKENS:
        name = next((name for name in TOKENS if table.last(name) is not None), "")
        return np.cumsum(np.nan_to_num(np.asarray(table.column(name)), nan=0.0))
    return np.asarray(table.steps, dtype=np.float64)


def short_labels(names: Sequence[str]) -> list[str]:
    """Names without what all of them begin and end with, in words: `reward/best_of_group` as `best of group`."""
    parts = [name.split("/") for name in names]
    if len(parts) == 1:
        return [parts[0][-1].replace("_", " ")]
    begin, end = _shared(parts), _shared([part[::-1] for part in parts])
    within = [" ".join(part[begin : max(begin, len(part) - end)]) or "all" for part in parts]
    shortest = [part[-1] for part in parts] if begin == end == 0 else within
    labels = shortest if len(set(shortest)) == len(shortest) else list(names)
    return [label.replace("_", " ") for label in labels]


def _shared(parts: Sequence[Sequence[str]]) -> int:
    """Returns how many leading parts all of them share."""
    return next((at for at, column in enumerate(zip(*parts, strict=False)) if len({*column}) > 1), min(map(len, parts)))


def _numbers(values: Floats) -> list[float | None]:
    """The values, None for those that no chart can draw."""
    if np.isfinite(values).all():
        return values.tolist()
    return [value if math.isfinite(value) else None for value in values.tolist()]
