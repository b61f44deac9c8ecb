"""Prepares rows for a stream of results, and puts results back into the order of their rows."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence

from palestra.gym.collect.rows import Row, agent_of
from palestra.gym.errors import GymError
from palestra.gym.nemo_rl.rollouts import Streamed
from palestra.gym.records import ROW_INDEX
from palestra.types.gym import PARAMS, TASK_INDEX
from palestra.util.json_types import JsonObject

Result = JsonObject


class BrokenStream(GymError):
    """The results do not match the rows: some are missing, duplicated or unknown."""


def prepared(rows: Sequence[Row], *, temperature: float, top_p: float, max_new_tokens: int | None = None) -> list[Row]:
    """Returns the rows of a batch as `run_rollouts` takes them: numbered, with the sampling parameters of training."""
    made: list[Row] = []
    for index, row in enumerate(rows):
        params = {**row[PARAMS], "temperature": temperature, "top_p": top_p}
        limits = [one for one in (params.get("max_output_tokens"), max_new_tokens) if one is not None]
        if limits:
            params["max_output_tokens"] = min(limits)
        made.append({**row, PARAMS: params, ROW_INDEX: index})
    return made


async def in_order(stream: AsyncIterable[Streamed], count: int) -> tuple[list[Result], dict[str, float]]:
    """Returns all results in the order of their rows, and the timing. Raises BrokenStream."""
    found: dict[int, Result] = {}
    timing: dict[str, float] = {}
    async for index, result, item in stream:
        _put(found, index, result, count)
        timing = item or timing
    _check_whole(found, count)
    return [found[index] for index in range(count)], timing


async def in_groups(
    stream: AsyncIterable[Streamed], rows: Sequence[Row], size: int
) -> AsyncIterator[tuple[int, list[Result]]]:
    """Yields groups of `size` consecutive rows when they are complete: the group's number, its results in order. Raises
    BrokenStream."""
    _check_groups(rows, size)
    found: dict[int, Result] = {}
    async for index, result, _ in stream:
        _put(found, index, result, len(rows))
        first = index - index % size
        places = range(first, first + size)
        if all(place in found for place in places):
            yield first // size, [found[place] for place in places]
    _check_whole(found, len(rows))


def _put(found: dict[int, Result], index: object, result: Result, count: int) -> None:
    if type(index) is not int or not 0 <= index < count:
        raise BrokenStream(f"a result came for row {index!r}, but there are rows 0 to {count - 1}")
    if index in found:
        raise BrokenStream(f"row {index} came twice")
    found[index] = result


def _check_whole(found: Mapping[int, Result], count: int) -> None:
    missing = [index for index in range(count) if index not in found]
    if missing:
        raise BrokenStream(f"{len(missing)} of {count} rows are missing, the first is {missing[0]}")


def _check_groups(rows: Sequence[Row], size: int) -> None:
    if size < 1 or len(rows) % size:
        raise ValueError(f"{len(rows)} rows cannot be divided into groups of {size}")
    for first in range(0, len(rows), size):
        group = rows[first : first + size]
        if len({agent_of(row) for row in group}) > 1 or len({row.get(TASK_INDEX) for row in group}) > 1:
            raise ValueError(f"rows {first} to {first + size - 1} are a group, but do not share one agent and one task")
