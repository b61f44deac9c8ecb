"""A run's records as JSON lines, CSV or Parquet.

Owns: columns and file formats. Never touches: the run's own files, except by reading.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING

from palestra.cli.output import needs_extra
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from palestra.runs.reader import RunReader

Row = JsonObject


def export_rows(run: RunReader, what: str, form: str, out: Path | None) -> int:
    """Writes the rows to the file, and returns how many there were."""
    rows = read_rows(run, what)
    if form == "jsonl":
        with opened(out) as stream:
            return sum(stream.write(json.dumps(row).encode() + b"\n") > 0 for row in rows)
    table = [flat(row) for row in rows]
    columns = list(dict.fromkeys(name for row in table for name in row))
    if form == "csv":
        with opened(out) as stream:
            write_csv(stream, columns, table)
    else:
        with needs_extra("train"):
            arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        with opened(out) as stream:
            parquet.write_table(arrow.table({name: [row.get(name) for row in table] for name in columns}), stream)
    return len(table)


def read_rows(run: RunReader, what: str) -> Iterable[Row]:
    from palestra.runs.reader import Part

    if what == "metrics":
        return run.read_metrics()
    part = Part(what)
    return (row for step in run.steps(part) for row in run.read_rollouts(step, part))


def flat(row: Row) -> Row:
    """A record without nesting: each metric of an environment becomes a column, conversations and tokens become JSON in
    a cell."""
    metrics = row.get("metrics")
    cells = {
        name: json.dumps(value) if isinstance(value, dict | list) else value
        for name, value in row.items()
        if name != "metrics"
    }
    return cells | {f"metrics.{name}": value for name, value in (metrics or {}).items()}


def write_csv(stream: IO[bytes], columns: list[str], rows: list[Row]) -> None:
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    text.flush()
    text.detach()


@contextmanager
def opened(out: Path | None) -> Iterator[IO[bytes]]:
    from palestra.util.files import replacing

    if out is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    else:
        with replacing(out.absolute()) as stream:
            yield stream
