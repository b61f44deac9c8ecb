"""Rows of datasets, one after the other: only the current one is in memory."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from palestra.data.errors import DatasetError, DatasetNotFound, RowPlace
from palestra.data.sources import TABLES, files_of
from palestra.util.json_types import JsonMapping

BOM = b"\xef\xbb\xbf"
TABLE_ROWS = 256
"""Rows of a table that are read at once; those of a conversation may be large."""
SHOWN_CHARS = 60


class RawRow(Struct, frozen=True):
    place: RowPlace
    line: bytes
    """JSON, without the line's end. A table's row is written as JSON without its nulls: tables have one for every field
    that any row has."""

    def content(self) -> JsonMapping:
        """Raises DatasetError."""
        try:
            row = msgspec.json.decode(self.line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            is_array = self.place.line == 1 and self.line.lstrip()[:1] == b"["
            hint = "; the file seems to be one JSON array, which jq -c '.[]' writes as lines" if is_array else ""
            raise DatasetError(f"not valid JSON ({error}){hint}", self.place) from None
        if not isinstance(row, dict):
            raise DatasetError(f"should be a JSON object, but is {shown(row)}", self.place)
        return row


def read_rows(source: str | Path) -> Iterator[RawRow]:
    """Gives the rows of a file, a folder of files, or a dataset of the hub. Raises DatasetError."""
    for file in files_of(source):
        try:
            yield from _table_rows(file) if file.suffix in TABLES else _lines(file)
        except OSError as error:
            kind = DatasetNotFound if isinstance(error, FileNotFoundError) else DatasetError
            raise kind(f"{file}: cannot be read as a dataset ({error.strerror or error})") from None


def _lines(file: Path) -> Iterator[RawRow]:
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            line = line.removeprefix(BOM) if number == 1 else line
            if line.strip():
                yield RawRow(RowPlace(str(file), number), line.removesuffix(b"\n").removesuffix(b"\r"))


def _table_rows(file: Path) -> Iterator[RawRow]:
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError:
        raise DatasetError(f"{file}: Parquet and Arrow files need pyarrow; install palestra[train]") from None
    number = 0
    try:
        if file.suffix == ".parquet":
            batches = parquet.ParquetFile(file).iter_batches(TABLE_ROWS)
        else:
            batches = ipc.open_stream(pyarrow.memory_map(str(file)))
        for batch in batches:
            for start in range(0, batch.num_rows, TABLE_ROWS):
                for row in batch.slice(start, TABLE_ROWS).to_pylist():
                    number += 1
                    yield RawRow(RowPlace(str(file), number), msgspec.json.encode(_without_nulls(row)))
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"{file}: cannot be read as a table ({error})") from None


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
