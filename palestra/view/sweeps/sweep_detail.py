"""The data of a sweep's page: findings, curves by setting, parallel coordinates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from palestra.runs.best_step import is_loss
from palestra.runs.reader import RunNotFound
from palestra.sweeps.findings import SweepFindings, find
from palestra.sweeps.folder import MemberState, SweepReader, find_sweep, list_sweeps
from palestra.sweeps.settings import setting_text
from palestra.util.figures import number_text
from palestra.view.runs.catalogue import Catalogue
from palestra.view.runs.charts import Axis, Board, Chart, ChartRow, Line, Series

MAX_CURVES = 8
"""As many settings as there are colours."""
AXIS_GAP, HEIGHT, MARGIN = 150, 180, 30
SHADES = 10


class ListedSweep(Struct, frozen=True):
    name: str
    created: float
    metric: str
    is_running: bool
    statuses: dict[str, int]
    best: str
    """The best setting so far."""
    value: float | None


class CoordinateAxis(Struct, frozen=True):
    name: str
    x: int
    ticks: list[tuple[float, str]]
    """Height and text."""


class CoordinateLine(Struct, frozen=True):
    """A run, as a line through its settings to what it has reached."""

    name: str
    points: str
    shade: int
    """The shade from 0, the worst, to 10."""
    title: str


class ParallelCoordinates(Struct, frozen=True):
    width: int
    height: int
    axes: list[CoordinateAxis]
    lines: list[CoordinateLine]


def open_sweep(runs: Catalogue, name: str) -> SweepReader:
    """Raises RunNotFound; a name never leads out of the folder."""
    if "/" in name or name in ("", ".", "..") or not (runs.root / name).resolve().is_relative_to(runs.root.resolve()):
        raise RunNotFound(f"there is no sweep {name[:100]!r} in {runs.root}")
    return find_sweep(name, runs.root)


def read_sweep(runs: Catalogue, name: str) -> SweepFindings:
    return find(open_sweep(runs, name))


def read_sweeps(runs: Catalogue) -> list[ListedSweep]:
    found = []
    for sweep in list_sweeps(runs.root):
        findings = find(sweep)
        best = findings.best
        found.append(
            ListedSweep(
                name=sweep.name,
                created=sweep.plan.created,
                metric=findings.metric,
                is_running=findings.is_running,
                statuses=findings.statuses,
                best=setting_text(best.settings) if best else "",
                value=best.mean if best else None,
            )
        )
    return found


def read_curves(findings: SweepFindings) -> Board:
    """A chart with a line for each of the best settings: the mean over its seeds."""
    states = {state.name: state for state in findings.members}
    lines = {
        setting_text(one.settings) or "as in the config": _mean_curve([states[name] for name in one.members])
        for one in findings.settings[:MAX_CURVES]
    }
    xs = sorted({step for curve in lines.values() for step in curve})
    drawn = [Line(findings.metric, name, None, [curve.get(x) for x in xs]) for name, curve in lines.items()]
    chart = Chart(findings.metric, Series([float(x) for x in xs], xs, drawn, False), [], False, False)
    row = ChartRow("Settings", "which settings learn, and how fast?", [chart])
    return Board(Axis.STEP, [row] if xs else [], [], max(xs, default=None), 0)


def _mean_curve(states: Sequence[MemberState]) -> dict[int, float]:
    """Returns the mean only where all seeds have a value: a mean over fewer would jump."""
    known = [state.values for state in states if state.values]
    steps = set.intersection(*map(set, known)) if known else set[int]()
    return {step: statistics.fmean(values[step] for values in known) for step in sorted(steps)}


def parallel_coordinates(findings: SweepFindings) -> ParallelCoordinates | None:
    """An axis for each key and one for the metric; None as long as no run has a value."""
    runs = [state for state in findings.members if state.last is not None]
    if not runs:
        return None
    columns: dict[str, list[Any]] = {key: [run.settings[key] for run in runs] for key in runs[0].settings}
    results = [value for run in runs if (value := run.last) is not None]
    columns[findings.metric] = results
    places = {name: _places(values) for name, values in columns.items()}
    axes = [
        CoordinateAxis(name, MARGIN + AXIS_GAP * number, _ticks(columns[name], places[name]))
        for number, name in enumerate(columns)
    ]
    low, high = min(results), max(results)
    lines = []
    for place, run in enumerate(runs):
        points = " ".join(f"{axis.x},{places[axis.name][place]:.1f}" for axis in axes)
        share = (results[place] - low) / (high - low) if high > low else 1.0
        shade = round(SHADES * (1 - share if is_loss(findings.metric) else share))
        title = f"{run.name} {setting_text(run.settings)}: {number_text(run.last)}"
        lines.append(CoordinateLine(run.name, points, shade, title))
    width = 2 * MARGIN + AXIS_GAP * (len(axes) - 1) + AXIS_GAP // 2
    return ParallelCoordinates(width, HEIGHT + 2 * MARGIN, axes, sorted(lines, key=lambda line: line.shade))


def _places(values: Sequence[Any]) -> list[float]:
    """The height of each value on its axis, the largest on top; of what spans two powers of ten, by the logarithm, and
    of what is no number, in the order of appearance."""
    if all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
        numbers = [float(one) for one in values]
        if min(numbers) > 0 and max(numbers) >= 100 * min(numbers):
            numbers = [math.log(one) for one in numbers]
    else:
        order: Mapping[str, int] = {text: place for place, text in enumerate(dict.fromkeys(map(str, values)))}
        numbers = [float(order[str(one)]) for one in values]
    low, high = min(numbers), max(numbers)
    scale = HEIGHT / (high - low) if high > low else 0.0
    return [MARGIN + (HEIGHT - (one - low) * scale if high > low else HEIGHT / 2) for one in numbers]


def _ticks(values: Sequence[Any], places: Sequence[float]) -> list[tuple[float, str]]:
    """All values if they are few, else the lowest and the highest."""
    known = dict(zip(places, map(number_text, values), strict=True))
    if len(known) > 5:
        known = {place: known[place] for place in (min(known), max(known))}
    return list(known.items())
