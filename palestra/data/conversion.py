"""Converts datasets from one layout to another."""

from __future__ import annotations

from pathlib import Path

import msgspec

from palestra.data.errors import DatasetError
from palestra.data.layouts import Layout, convert_row
from palestra.data.pictures import with_moved_paths
from palestra.data.rows import read_rows
from palestra.util.atomic_files import replacing


def convert_dataset(source: str | Path, out: Path, to: Layout, *, lossy: bool) -> int:
    """Returns the number of rows. The file appears when all of them are converted. Raises DatasetError."""
    rows = 0
    with replacing(out) as stream:
        for row in read_rows(source):
            try:
                content = with_moved_paths(row.content(), Path(row.place.file).parent, out.parent)
                converted = convert_row(content, to, lossy=lossy)
            except DatasetError as error:
                raise DatasetError(error.problem, row.place) from None
            stream.write(msgspec.json.encode(converted) + b"\n")
            rows += 1
        if not rows:
            raise DatasetError(f"{source} is empty; it should hold one JSON object in each line")
    return rows
