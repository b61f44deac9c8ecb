"""A run's records as JSON lines, CSV or Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from importlib import import_module
from typing import IO

from palestra.runs.reader import Part, Row, RunReader
from palestra.util.json_types import JsonMapping


def write_rows(run: RunReader, what: str, form: str, stream: IO[bytes]) -> int:
    """Writes the rows, and returns how many there were. Parquet needs pyarrow."""
    rows = read_rows(run, what)
    if form == "jsonl":
        return sum(stream.write(json.dumps(row).encode() + b"\n") > 0 for row in rows)
    table = [flat(row) for row in rows]
    columns = list(dict.fromkeys(name for row in table for name in row))
    if form == "csv":
        write_csv(stream, columns, table)
    else:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        parquet.write_table(arrow.table({name: [row.get(name) for row in table] for name in columns}), stream)
    return len(table)


def read_rows(run: RunReader, what: str) -> Iterable[JsonMapping]:
    if what == "metrics":
        return run.read_metrics()
    part = Part(what)
    return (row for step in run.steps(part) for row in run.read_rollouts(step, part))


def flat(row: JsonMapping) -> Row:
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
