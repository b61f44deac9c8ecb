"""The files of benchmarks as they are published: found in the hub's cache, a folder or a file, and read row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from palestra.environments.benchmarks.catalogue import Benchmark
from palestra.environments.errors import TaskFileError
from palestra.environments.tasks import Row, read_rows
from palestra.util.hugging_face import hub_cache, snapshots_of
from palestra.util.json_types import JsonMapping


def rows_of(benchmark: Benchmark, given: str | None) -> Iterator[Row]:
    """Yields the rows of a benchmark. `given` is a file or folder; without it, the cache of the hub is searched.
    Raises TaskFileError."""
    for file in data_files(benchmark, given):
        yield from read_rows(file)


def data_files(benchmark: Benchmark, given: str | None) -> list[Path]:
    """Raises TaskFileError, which names the files that are expected and how to get them."""
    if given is not None:
        path = Path(given).expanduser()
        if path.is_file():
            return [path]
        if path.is_dir() and (found := _matching(path, benchmark.files)):
            return found
        what = f"has none of its files ({', '.join(benchmark.files)})" if path.is_dir() else "is no file or folder"
        raise TaskFileError(f"{benchmark.name}: {path} {what}; {how_to_get(benchmark)}")
    for hub_id in benchmark.hub:
        for snapshot in snapshots_of("datasets", hub_id):
            if found := _matching(snapshot, benchmark.files):
                return found
    where = f"{benchmark.hub[0]} is not in the cache {hub_cache()}" if benchmark.hub else "its files are not here"
    raise TaskFileError(f"{benchmark.name}: {where}; {how_to_get(benchmark)}")


def field(row: Row, *names: str) -> object:
    """Returns the first of these fields that a row has. Raises TaskFileError."""
    if (found := first_field(row.content, *names)) is None:
        had = ", ".join(row.content) or "nothing"
        raise TaskFileError(f"{row.where}: no {' or '.join(map(repr, names))} (it has {had})")
    return found


def first_field(content: JsonMapping, *names: str) -> object:
    return next((content[name] for name in names if content.get(name) is not None), None)


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return next((found for pattern in patterns if (found := sorted(folder.glob(pattern)))), [])


def how_to_get(benchmark: Benchmark) -> str:
    """The end of an error's text: where the files are, and how to name them."""
    return f"to get them: {benchmark.how_to_get}\n  or name a file or folder of your own: --data {benchmark.name}=PATH"
