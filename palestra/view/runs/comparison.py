"""Runs beside each other: curves over one axis, where their configs differ, tasks that one solved and another did
not."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from palestra.runs.facts import differing_settings
from palestra.runs.metric_table import MetricTable
from palestra.runs.reader import Part, RunReader
from palestra.view.rollouts.rollout_list import read_step
from palestra.view.runs.catalogue import Catalogue, ListedRun
from palestra.view.runs.charts import Axis, Board, Chart, ChartRow, Line, Series, Window, read_series
from palestra.view.runs.panels import ROWS, matching

MAX_RUNS = 8
MAX_TASKS = 60


class ComparisonError(ValueError):
    """What is wrong with the choice of runs."""


class Difference(Struct, frozen=True):
    """A key of the config, or a metric, with its value in each run."""

    name: str
    values: list[object]


class TaskOutcome(Struct, frozen=True):
    run: str
    step: int
    rollout: str
    reward: float


class TaskRow(Struct, frozen=True):
    """A task of the last evaluations, with a rollout of each run."""

    environment: str
    task: str
    prompt: str
    outcomes: list[TaskOutcome]
    difference: float
    """Between the highest and the lowest reward."""


class RunComparison(Struct, frozen=True):
    runs: list[ListedRun]
    config: list[Difference]
    metrics: list[Difference]
    """The newest values of the metrics that are drawn."""
    tasks: list[TaskRow]
    """The tasks in which the runs differ most."""
    common_tasks: int


def compare_runs(catalogue: Catalogue, names: Sequence[str]) -> RunComparison:
    runs = _open(catalogue, names)
    settings = differing_settings(run.read_about().get("config") for run in runs)
    tables = [catalogue.metrics(run) for run in runs]
    shown = [name for row in ROWS for name in _drawn(row.title, tables)]
    tasks = _common_tasks(runs)
    differing = [row for row in tasks if row.difference > 0]
    return RunComparison(
        runs=[catalogue.row(run) for run in runs],
        config=[Difference(name, values) for name, values in settings.items()],
        metrics=[Difference(name, [table.last(name) for table in tables]) for name in shown],
        tasks=sorted(differing, key=lambda row: -row.difference)[:MAX_TASKS],
        common_tasks=len(tasks),
    )


def compare_charts(catalogue: Catalogue, names: Sequence[str], window: Window) -> Board:
    """A chart for each of the metrics looked at first, with a line for each run."""
    runs = _open(catalogue, names)
    tables = {run.name: catalogue.metrics(run) for run in runs}
    rows = []
    for row in ROWS:
        metrics = _drawn(row.title, [*tables.values()])
        charts = [_chart(metric, tables, window) for metric in metrics]
        if charts:
            rows.append(ChartRow(row.title, row.question, charts))
    last = max((table.steps[-1] for table in tables.values() if table.steps), default=None)
    return Board(window.axis, rows, [], last, 0)


def _open(catalogue: Catalogue, names: Sequence[str]) -> list[RunReader]:
    chosen = list(dict.fromkeys(names))
    if not 2 <= len(chosen) <= MAX_RUNS:
        raise ComparisonError(f"choose 2 to {MAX_RUNS} runs; these are {len(chosen)}")
    return [catalogue.open(name) for name in chosen]


def _drawn(title: str, tables: Sequence[MetricTable]) -> list[str]:
    """The first metric of each chart that any of the runs has."""
    names = {name for table in tables for name in table.names}
    (row,) = (row for row in ROWS if row.title == title)
    found = [matching(panel.lines, sorted(names))[:1] for panel in row.panels if "*" not in panel.lines[0]]
    return [name for one in found for name in one]


def _chart(metric: str, tables: dict[str, MetricTable], window: Window) -> Chart:
    parts = {run: read_series(table, [metric], window) for run, table in tables.items()}
    xs = sorted({x for series in parts.values() for x in series.x})
    lines = []
    for run, series in parts.items():
        values = dict(zip(series.x, series.lines[0].values, strict=True))
        lines.append(Line(metric, run, series.lines[0].description, [values.get(x) for x in xs]))
    steps = [int(x) for x in xs] if window.axis is Axis.STEP else [0] * len(xs)
    is_sampled = any(series.is_sampled for series in parts.values())
    return Chart(metric, Series(xs, steps, lines, is_sampled), [], False, False)


def _common_tasks(runs: Sequence[RunReader]) -> list[TaskRow]:
    """Tasks that the last evaluation of every run has."""
    outcomes = [_outcomes(run) for run in runs]
    common = set.intersection(*(set(one) for one in outcomes))
    rows = []
    for environment, task in sorted(common):
        found = [one[environment, task] for one in outcomes]
        rewards = [outcome.reward for outcome, _ in found]
        difference = max(rewards) - min(rewards)
        rows.append(TaskRow(environment, task, found[0][1], [outcome for outcome, _ in found], difference))
    return rows


def _outcomes(run: RunReader) -> dict[tuple[str, str], tuple[TaskOutcome, str]]:
    steps = run.steps(Part.EVAL)
    found: dict[tuple[str, str], tuple[TaskOutcome, str]] = {}
    for record in read_step(run, Part.EVAL, steps[-1]) if steps else ():
        reward = record.get("reward")
        if isinstance(reward, int | float):
            key = str(record.get("environment")), str(record.get("task"))
            outcome = TaskOutcome(run.name, steps[-1], str(record.get("id")), float(reward))
            found.setdefault(key, (outcome, str(record.get("prompt"))))
    return found
