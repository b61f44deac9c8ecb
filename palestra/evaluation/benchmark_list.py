"""Lists what each benchmark needs, and what of it is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec import Struct

from palestra.environments.benchmarks.catalogue import BENCHMARKS, Benchmark
from palestra.environments.benchmarks.files import data_files
from palestra.environments.benchmarks.grader_python import grader_python
from palestra.environments.errors import TaskFileError
from palestra.evaluation.targets import benchmark_folder
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
    python: str | None
    """The Python that has its grader; None for a grader that is ours, or that is not installed."""
    missing: list[str]
    """What is not here, each with how to get it."""


def list_benchmarks() -> list[ListedBenchmark]:
    return [_listed(one) for one in BENCHMARKS.values()]


def _listed(benchmark: Benchmark) -> ListedBenchmark:
    missing: list[str] = []
    data = _found(partial(_data, benchmark), missing)
    python = _found(partial(grader_python, benchmark, None), missing) if benchmark.package else None
    return ListedBenchmark(
        name=benchmark.name,
        about=benchmark.about,
        grader=benchmark.grader,
        grader_license=benchmark.grader_license,
        data_license=benchmark.data_license,
        page=benchmark.page,
        get=benchmark.how_to_get,
        data=None if data is None else str(data),
        python=None if python is None else str(python),
        missing=missing,
    )


def _data(benchmark: Benchmark) -> Path | None:
    if benchmark.environment == CODING:
        return benchmark_folder(benchmark, None)
    return data_files(benchmark, None)[0] if benchmark.hub else None


def _found(look: Callable[[], Path | None], missing: list[str]) -> Path | None:
    try:
        return look()
    except TaskFileError as error:
        missing.append(str(error))
        return None
