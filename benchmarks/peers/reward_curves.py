"""The rows of `time_to_reward` as a picture: success on held-out tasks against seconds and against sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from peers.reward_rows import Cell, Point, Row, best_rate, cells_of, points_of

from palestra.util.atomic_files import replacing

COLOURS = {"ours": "tab:blue", "trl": "tab:orange", "band": "tab:green", "replay": "tab:purple"}
LABELS = {
    "ours": "Palestra",
    "trl": "TRL's GRPOTrainer",
    "band": "with a band of difficulty",
    "replay": "with tasks played again",
}
AXES = (("train_s", "seconds of training"), ("sampled", "sampled tokens"))


def draw(rows: Sequence[Row], tasks: Sequence[str], goal: float, base: dict[str, Point], file: Path) -> None:
    """A row of panels for each task. Strong lines are the seeds of the learning rate that was best, weak lines those of
    the others."""
    figures: Any = import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(4.6 * len(AXES), 3.2 * len(tasks)), layout="constrained")
    for number, task in enumerate(tasks):
        for place, (axis, label) in enumerate(AXES, 1):
            axes = figure.add_subplot(len(tasks), len(AXES), number * len(AXES) + place)
            axes.set_title(task, loc="left", fontsize=10)
            axes.set_xlabel(label, fontsize=8)
            axes.set_ylabel("held-out tasks solved", fontsize=8)
            axes.set_ylim(0, 1)
            axes.grid(alpha=0.3)
            axes.axhline(goal, color="grey", linestyle=":", linewidth=1)
            for who in COLOURS:
                _draw_cells(axes, rows, cells_of(rows, task=task, who=who), axis, base.get(task))
            axes.legend(fontsize=7, loc="lower right")
    with replacing(file.absolute()) as stream:
        figure.savefig(stream, format=file.suffix[1:], dpi=120)


def _draw_cells(axes: Any, rows: Sequence[Row], cells: Sequence[Cell], axis: str, base: Point | None) -> None:
    best, labelled = best_rate(rows, cells), False
    for cell in cells:
        points = [*([base] if base else []), *points_of(rows, cell)]
        is_best = cell.lr == best
        label = f"{LABELS[cell.who]}, learning rate {cell.lr:g}" if is_best and not labelled else None
        labelled |= is_best
        axes.plot(
            [getattr(point, axis) for point in points],
            [point.success for point in points],
            color=COLOURS[cell.who],
            alpha=1.0 if is_best else 0.25,
            linewidth=1.5 if is_best else 0.8,
            label=label,
        )
