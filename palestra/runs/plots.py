"""A run as a picture: reward with its spread, and its health."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec import Struct

from palestra.runs.reader import RunReader
from palestra.runs.record_files import RunError
from palestra.util.atomic_files import replacing
from palestra.util.json_types import JsonObject

SUFFIXES = (".png", ".svg")
Row = JsonObject


class Panel(Struct, frozen=True):
    title: str
    lines: tuple[str, ...]
    band: tuple[str, str] | None = None
    """Metrics of the lower and upper edge of the shaded band."""
    stacked: bool = False


RESULTS = (
    Panel("reward", ("reward/mean", "reward/best_of_group"), ("reward/p10", "reward/p90")),
    Panel("evaluation", ("eval/success", "eval/reward_mean", "eval/pass_at_4", "eval/pass_at_8")),
    Panel("loss", ("loss/mean", "eval/loss")),
)
PANELS = (
    *RESULTS,
    Panel("shares", ("rollouts/truncated_share", "rollouts/zero_variance_share", "stop/env_failed", "stop/timeout")),
    Panel("length in tokens", ("length/mean", "length/max")),
    Panel("entropy", ("policy/entropy_estimate",)),
    Panel("KL", ("kl/sampler_trainer_k3", "kl/base", "kl/teacher")),
    Panel("gradient norm", ("optim/grad_norm",)),
    Panel("seconds of a step", ("time/collect_s", "time/score_s", "time/update_s", "time/sync_s"), stacked=True),
)


def draw(run: RunReader, file: Path, panels: Sequence[Panel] = PANELS) -> list[str]:
    """Draws the panels, and returns the titles of those that had data. Raises RunError if none had any."""
    figures: Any = import_module("matplotlib.figure")
    rows = run.read_metrics()
    panels = [panel for panel in panels if any(series(rows, name)[0] for name in panel.lines)]
    if not panels:
        raise RunError(f"run {run.name} has no metrics to draw yet")
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    figure = figures.Figure(figsize=(4.6 * columns, 3.2 * height), layout="constrained")
    for place, panel in enumerate(panels, 1):
        draw_panel(figure.add_subplot(height, columns, place), panel, rows)
    figure.suptitle(run.name, parse_math=False)
    with replacing(file.absolute()) as stream:
        figure.savefig(stream, format=file.suffix[1:], dpi=120)
    return [panel.title for panel in panels]


def draw_panel(axes: Any, panel: Panel, rows: Sequence[Row]) -> None:
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.set_xlabel("step", fontsize=8)
    axes.grid(alpha=0.3)
    if panel.band:
        steps, low = series(rows, panel.band[0])
        high = series(rows, panel.band[1])[1]
        if steps and len(low) == len(high):
            axes.fill_between(steps, low, high, alpha=0.2, label="p10 to p90")
    if panel.stacked:
        drawn = [name for name in panel.lines if series(rows, name)[0]]
        steps = [row["step"] for row in rows if any(row.get(name) is not None for name in drawn)]
        heights = [[row.get(name) or 0.0 for row in rows if row["step"] in set(steps)] for name in drawn]
        axes.stackplot(steps, heights, labels=[short(name) for name in drawn], alpha=0.7)
    else:
        for name in panel.lines:
            steps, values = series(rows, name)
            if steps:
                axes.plot(steps, values, label=short(name), marker="o" if len(steps) < 30 else None, markersize=3)
    axes.legend(fontsize=7)


def series(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def short(name: str) -> str:
    return name.partition("/")[2].replace("_", " ")
