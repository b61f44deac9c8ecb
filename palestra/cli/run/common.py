"""Shared by the commands about runs: finding a run, printing columns, text that cannot harm a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from palestra.cli.output import needs_extra, one_line_errors

if TYPE_CHECKING:
    from palestra.runs.reader import RunReader

BARS = "▁▂▃▄▅▆▇█"

runs_option = click.option(
    "--runs",
    "root",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    metavar="DIR",
    help="Folder of the runs.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@contextmanager
def run_errors() -> Iterator[None]:
    from palestra.runs.record_files import RunError

    with one_line_errors(RunError), needs_extra("train"):
        yield


def find(which: str, root: Path) -> RunReader:
    from palestra.runs.reader import find_run

    return find_run(which, root)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """A curve of numbers in one line; neighbours are averaged if there are more than `width`."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < 2:
        return ""
    bins = min(width, len(numbers))
    cuts = [round(i * len(numbers) / bins) for i in range(bins + 1)]
    means = [math.fsum(numbers[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)
