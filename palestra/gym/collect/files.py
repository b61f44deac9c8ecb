"""The files of one collection, beside its output: inputs, results, failures."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

import orjson

from palestra.gym.errors import CollectError
from palestra.util.atomic_files import replacing
from palestra.util.json_types import JsonMapping, JsonObject


class OutputFiles:
    """File names: for `d/x.jsonl` `d/x_failures.jsonl` and so on."""

    def __init__(self, output: Path) -> None:
        self.results = output
        self.inputs = self._beside("_materialized_inputs.jsonl")
        self.failures = self._beside("_failures.jsonl")
        self.metrics = self._beside("_aggregate_metrics.json")
        self.facts = self._beside("_collection.json")
        """What the collection was made of, which a resume is compared with."""

    def _beside(self, ending: str) -> Path:
        return self.results.with_name(self.results.stem + ending)

    def start_over(self, results: JsonLinesFile, failures: JsonLinesFile) -> None:
        """Deletes the files while holding both of them, so that no other writer loses its data."""
        for lines in (results, failures):
            lines.empty()
        for path in (self.inputs, self.metrics, self.facts):
            path.unlink(missing_ok=True)


class JsonLinesFile:
    """A file of JSON lines to which only whole lines are appended. A second writer is refused."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: BinaryIO = path.open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise CollectError(
                f"{path} is being written by another collection; wait for it, or choose another"
            ) from error
        self._end = whole_length(path)
        self._file.truncate(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def is_empty(self) -> bool:
        return self._end == 0

    def empty(self) -> None:
        self._file.truncate(0)
        self._end = 0

    def append(self, line: JsonMapping) -> None:
        """Appends a line; when this returns, the operating system has the whole line. Raises CollectError, and then the
        file is as before; TypeError for a value that is nested too deeply."""
        data = orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._file.truncate(self._end)
            raise CollectError(
                f"cannot write {self._path}: {os.strerror(error.errno or 0)}. All rows before it are kept; "
                "free some space and continue with --resume"
            ) from error
        self._end += len(data)


def whole_length(path: Path) -> int:
    """Returns the length up to the end of the last line: what a crash left half written does not count."""
    size = path.stat().st_size
    with path.open("rb") as file:
        end = size
        while end:
            start = max(0, end - 65_536)
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            if at >= 0:
                return start + at + 1
            end = start
    return 0


def read_lines(path: Path) -> Iterator[JsonObject]:
    """Yields whole lines; none if there is no file. Raises CollectError for a line that is not a JSON object."""
    if not path.exists():
        return
    left = whole_length(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            left -= len(line)
            if left < 0:
                return
            if line.strip():
                yield _object(path, number, line)


def write_whole(path: Path, data: bytes) -> None:
    """Replaces a file completely; after a crash it has its old or its new content. Raises CollectError."""
    try:
        with replacing(path) as file:
            file.write(data)
    except OSError as error:
        raise CollectError(f"cannot write {path}: {error.strerror}") from error


def _object(path: Path, number: int, line: bytes) -> JsonObject:
    try:
        found = orjson.loads(line)
    except ValueError as error:
        raise CollectError(f"{path}, line {number} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise CollectError(f"{path}, line {number} is not an object")
    return found
