"""Tasks of an entry `verifiers:NAME`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from palestra.environments.errors import EnvironmentFailure, TaskFileError
from palestra.environments.held_out import is_held_out
from palestra.environments.verifiers.host_process import EVAL, TRAIN, VerifiersHost
from palestra.environments.verifiers.settings import VerifiersSettings, settings_of
from palestra.types.rollouts import Task

if TYPE_CHECKING:
    from palestra.config.environment_entries import EnvironmentEntry

Split = Literal["train", "eval"]
Rows = list[dict[str, Any]]


def verifiers_tasks(entry: EnvironmentEntry, split: Split) -> Sequence[Task]:
    """Returns tasks. Raises TaskFileError with what the environment raised."""
    try:
        found = _listed(entry.name, msgspec.json.encode(settings_of(entry), order="sorted"))
    except EnvironmentFailure as error:
        raise TaskFileError(f"environment {entry.name!r}: {error}") from None
    return [_task(entry.name, *one) for one in found[split]]


@cache
def _listed(name: str, settings: bytes) -> dict[Split, list[tuple[str, Split, dict[str, Any]]]]:
    """Returns rows with their part and split. They are listed in a thread: the caller may run in an event loop."""
    with ThreadPoolExecutor(1) as thread:
        listing = _list(name, msgspec.json.decode(settings, type=VerifiersSettings))
        return thread.submit(asyncio.run, listing).result()


async def _list(name: str, settings: VerifiersSettings) -> dict[Split, list[tuple[str, Split, dict[str, Any]]]]:
    with tempfile.TemporaryDirectory() as folder:
        async with VerifiersHost(name, settings, Path(folder) / "verifiers.log") as host:
            train = await _rows(host, TRAIN, "train", settings)
            if settings.eval_args is not None:
                own = await _rows(host, EVAL, "eval", settings) or await _rows(host, EVAL, "train", settings)
                return {"train": train, "eval": own}
            if own := await _rows(host, TRAIN, "eval", settings):
                return {"train": train, "eval": own}
    held_out = [is_held_out(str([row.get("key"), row["prompt"]])) for _, _, row in train]
    return {
        "train": [one for one, is_out in zip(train, held_out, strict=True) if not is_out],
        "eval": [one for one, is_out in zip(train, held_out, strict=True) if is_out],
    }


async def _rows(
    host: VerifiersHost, part: str, split: Split, settings: VerifiersSettings
) -> list[tuple[str, Split, dict[str, Any]]]:
    rows: Rows = await host.call("tasks", part=part, split=split, limit=settings.limit)
    return [(part, split, row) for row in rows]


def _task(name: str, part: str, split: Split, row: dict[str, Any]) -> Task:
    place = "" if part == split == "train" else f"{part}-{split}-"
    named = {"key": row["key"]} if row.get("key") else {}
    return Task(
        id=f"{place}{row['index']}",
        environment=name,
        prompt=row["prompt"],
        extras={"part": part, "split": split, "index": row["index"], **named},
    )
