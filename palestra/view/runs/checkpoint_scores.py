"""Scores of a run's checkpoints on benchmarks, over its steps: from the evaluations beside it."""

from __future__ import annotations

import re

import msgspec

from palestra.runs.metric_table import MetricTable
from palestra.runs.record_files import RunError
from palestra.view.runs.catalogue import Catalogue
from palestra.view.runs.charts import Axis, Board, Chart, ChartRow, Line, Series, Window, read_board
from palestra.view.runs.metric_descriptions import explain

SCORE = re.compile(r"eval/([^/]+)/pass_at_1")
MANY = 1000  # evaluations that are looked at, the newest first
TITLE, QUESTION = "Benchmarks", "How good are its checkpoints, by `palestra eval`?"
Points = dict[int, tuple[float, float, float]]
"""The score and the ends of its interval, by step."""


def read_run_board(catalogue: Catalogue, name: str, window: Window) -> Board:
    """A run's charts, and below them those of its checkpoints' scores, over steps."""
    board = read_board(catalogue.metrics(catalogue.open(name)), window)
    if window.axis is not Axis.STEP or not (scores := checkpoint_scores(catalogue, name)):
        return board
    charts = [_chart(metric, points, window) for metric, points in sorted(scores.items())]
    return msgspec.structs.replace(board, rows=[*board.rows, ChartRow(TITLE, QUESTION, charts)])


def checkpoint_scores(catalogue: Catalogue, name: str) -> dict[str, Points]:
    """Scores by metric and step of the run. Of several evaluations of one checkpoint the newest counts."""
    found: dict[str, Points] = {}
    for run in reversed(catalogue.all()[:MANY]):
        try:
            about = run.read_about()
            checkpoint = (about.get("facts") or {}).get("checkpoint") or {}
            if about.get("kind") != "eval" or checkpoint.get("run") != name:
                continue
            step, table = checkpoint.get("step"), catalogue.metrics(run)
        except (RunError, AttributeError):
            continue  # the list of runs says what is wrong with it
        if not isinstance(step, int):
            continue
        for metric in filter(SCORE.fullmatch, table.names):
            if (point := _point(table, metric)) is not None:
                found.setdefault(metric, {})[step] = point
    return found


def _point(table: MetricTable, metric: str) -> tuple[float, float, float] | None:
    value, low, high = (table.last(name) for name in (metric, f"{metric}_low", f"{metric}_high"))
    return None if value is None or low is None or high is None else (value, low, high)


def _chart(metric: str, points: Points, window: Window) -> Chart:
    steps = sorted(step for step in points if window.low <= step <= window.high)
    benchmark = metric.split("/")[1]
    names = (metric, f"{metric}_low", f"{metric}_high")
    labels = (benchmark, "95% from", "95% to")
    line, low, high = (
        Line(one, label, explain(one), [points[step][place] for step in steps])
        for place, (one, label) in enumerate(zip(names, labels, strict=True))
    )
    series = Series([float(step) for step in steps], steps, [line], is_sampled=False)
    return Chart(f"{benchmark} pass@1", series, [low, high], is_stacked=False, is_share=True)
