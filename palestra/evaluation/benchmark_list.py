"""What each benchmark needs, and what of it is here.

Owns: looking for files and graders. Never touches: reading them.
"""

from __future__ import annotations

from msgspec import Struct

from palestra.environments.benchmarks.catalogue import BENCHMARKS, Benchmark
from palestra.environments.benchmarks.files import data_files
from palestra.environments.benchmarks.grader_python import grader_python
from palestra.environments.errors import TaskFileError
from palestra.evaluation.named import benchmark_folder
from palestra.types.rollouts import CODING


class ListedBenchmark(Struct, frozen=True, kw_only=True):
    """A benchmark as `palestra eval list` shows it."""

    name: str
    about: str
    grader: str
    grader_license: str
    data_license: str
    page: str
    get: str
    """How to get its files."""
    data: str | None
    """The file or folder that is found here; None: `--data NAME=PATH` has to name one."""
    missing: list[str]
    """What is not here, each with how to get it."""


def list_benchmarks() -> list[ListedBenchmark]:
    return [_listed(one) for one in BENCHMARKS.values()]


def _listed(benchmark: Benchmark) -> ListedBenchmark:
    missing: list[str] = []
    return ListedBenchmark(
        name=benchmark.name,
        about=benchmark.about,
        grader=benchmark.grader,
        grader_license=benchmark.grader_license,
        data_license=benchmark.data_license,
        page=benchmark.page,
        get=benchmark.how_to_get,
        data=_data(benchmark, missing),
        missing=missing,
    )


def _data(benchmark: Benchmark, missing: list[str]) -> str | None:
    found: str | None = None
    try:
        if benchmark.environment == CODING:
            found = str(benchmark_folder(benchmark, None))
        elif benchmark.hub:
            found = str(data_files(benchmark, None)[0])
        if benchmark.package is not None:
            python = grader_python(benchmark, None)
            found = found or str(python)
    except TaskFileError as error:
        missing.append(str(error))
    return found
