"""Pairs a collection's rows with their results."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from palestra.gym.collect.files import read_lines
from palestra.gym.collect.rows import Key, Row, key_of
from palestra.gym.errors import CollectError
from palestra.types.gym import ROLLOUT_INDEX, TASK_INDEX
from palestra.util.json_types import JsonObject

_TOLD = 10


class RowWithResult(Struct, frozen=True):
    row: Row
    result: JsonObject


def indexed(path: Path, lines: Iterable[JsonObject] | None = None) -> dict[Key, JsonObject]:
    """Returns lines by task and rollout. Raises CollectError for a line without indices, and for a duplicate."""
    found: dict[Key, JsonObject] = {}
    for number, line in enumerate(read_lines(path) if lines is None else lines, 1):
        if TASK_INDEX not in line or ROLLOUT_INDEX not in line:
            raise CollectError(
                f"{path}, line {number} has no {TASK_INDEX} or {ROLLOUT_INDEX}; is it the output of a collection?"
            )
        key = key_of(line)
        if key in found:
            raise CollectError(f"{path} has task {key[0]}, rollout {key[1]} twice")
        found[key] = line
    return found


def merged(paths: Iterable[Path]) -> list[JsonObject]:
    """Returns the results of several files, e.g. of shards, in the order of tasks. Raises CollectError for a
    duplicate."""
    lines = (line for path in paths for line in read_lines(path))
    found = indexed(Path("these files"), lines)
    return [found[key] for key in sorted(found)]


def paired(inputs: Path, rollouts: Path, *, partial: bool) -> list[RowWithResult]:
    """Returns pairs in the order of tasks. Raises CollectError if the files are not of one collection; rows without a
    result are an error unless `partial`."""
    for path in (inputs, rollouts):
        if not path.exists():
            raise CollectError(f"there is no file {path}")
    rows, results = indexed(inputs), indexed(rollouts)
    strange = sorted(results.keys() - rows.keys())
    if strange:
        raise CollectError(f"{rollouts} has {len(strange)} results without a row in {inputs}: {_listed(strange)}")
    missing = sorted(rows.keys() - results.keys())
    if missing and not partial:
        raise CollectError(
            f"{len(missing)} rows have no result: {_listed(missing)}; continue collecting, or give --partial"
        )
    return [RowWithResult(rows[key], results[key]) for key in sorted(results)]


def _listed(keys: list[Key]) -> str:
    listed = ", ".join(f"{task}:{rollout}" for task, rollout in keys[:_TOLD])
    return listed + (", …" if len(keys) > _TOLD else "")
