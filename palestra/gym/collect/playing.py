"""Plays one row through its agent; the outcome is a result or failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import TypeVar

import orjson
from msgspec import Struct, field

from palestra.environments.gym.directory import ServerDirectory
from palestra.environments.gym.errors import RowFailed
from palestra.gym.collect.rows import Row, agent_of, key_of
from palestra.gym.models.capture import CaptureFolder, folders
from palestra.gym.models.capture_records import model_call_capture, trajectory
from palestra.gym.models.prefix_merge import folded, rebuild
from palestra.gym.models.settings import read_capture
from palestra.gym.servers.agents import rollout_id_of
from palestra.net.http_client import HttpClient
from palestra.rollouts.gym.row_calls import RetryPolicy, RowCalls, row_attempts
from palestra.types.gym import (
    AGENT_REF,
    ATTEMPT_INDEX,
    NO_PERSIST,
    ROLLOUT_ID,
    ROLLOUT_INDEX,
    TASK_INDEX,
)
from palestra.types.gym_failures import REASON_CHARS, FailureClass, RowFailure
from palestra.util.json_types import JsonMapping, JsonObject


class CapturedCalls:
    """What a gym captures of model calls: exchanges, token ids, both or neither, in folders that this machine can
    read."""

    def __init__(
        self, calls: CaptureFolder | None = None, tokens: CaptureFolder | None = None, *, rebuilds: bool = True
    ) -> None:
        self._calls, self._tokens, self._rebuilds = calls, tokens, rebuilds

    @classmethod
    def of_gym(cls, settings: JsonMapping) -> CapturedCalls:
        """Reads the settings. Raises GymConfigError."""
        found = read_capture(settings)
        return cls(*folders(found), rebuilds=found.tokens.rebuild_response)

    def clear(self, rows: Iterable[Row]) -> None:
        """Deletes captures before rows are played: those of an earlier run had the same ids."""
        ids = [name for row in rows if (name := rollout_id_of(row)) is not None]
        for folder in (self._calls, self._tokens):
            if folder is not None:
                folder.clear(ids)

    def into(self, result: JsonObject, row: Row) -> JsonObject:
        name = rollout_id_of(row)
        if name is None:
            return result
        if self._calls is not None:
            kept = self._calls.read(name)
            task, _ = key_of(row)
            result["ng_model_call_capture"] = model_call_capture(name, kept)
            result["ng_trajectory"] = trajectory(str(task), name, kept)
        if self._tokens is not None:
            kept = self._tokens.read(name)
            is_incomplete = kept.is_incomplete or kept.damaged > 0
            rebuilt = rebuild(kept.lines, is_incomplete=is_incomplete)
            return folded(result, rebuilt, rebuild_response=self._rebuilds)
        return result


_CARRIED = ("skills_ref", ATTEMPT_INDEX, ROLLOUT_ID)


class PlayedRow(Struct, kw_only=True):
    """The outcome of a row."""

    row: Row
    result: JsonObject | None = None
    """The agent's answer with its indices; None: it failed, or must not be stored."""
    failures: list[JsonObject] = field(default_factory=list)
    """One entry for each failed attempt."""

    def give_up(self, why: Exception) -> None:
        """Marks the row as failed, because its result cannot be stored."""
        self.result = None
        failure = RowFailure(kind=FailureClass.BAD_ANSWER, reason=f"cannot be written: {why}", is_final=True)
        self.failures.append(_labelled(self.row, failure.fields()))


class RowPlayer:
    """Plays rows of a running gym. It has no state except for the connection pool."""

    def __init__(
        self,
        client: HttpClient,
        directory: ServerDirectory,
        patience: RetryPolicy | None = None,
        captured: CapturedCalls | None = None,
    ) -> None:
        self._directory = directory
        self._patience = patience or RetryPolicy()
        self._calls = RowCalls(client, directory, self._patience.lost_limit_s)
        self._captured = captured or CapturedCalls()

    def check(self, rows: Iterable[Row]) -> None:
        """Raises UnknownAgent for an agent that the gym does not have."""
        for name in {agent_of(row) or "" for row in rows}:
            self._directory.agent(name)

    async def play(self, row: Row, failed_before: int = 0) -> PlayedRow:
        """Plays a row. It raises only when it is cancelled. `failed_before`: attempts of an earlier run of the
        collection."""
        played = PlayedRow(row=row)
        async with aclosing(row_attempts(self._post, row, self._patience, failed_before)) as attempts:
            async for attempt in attempts:
                answer = self._captured.into(_labelled(attempt.row, attempt.result), attempt.row)
                if answer.get(NO_PERSIST):
                    break
                if attempt.failure is None:
                    played.result = answer
                else:
                    played.failures.append(answer)
        return played

    async def _post(self, row: Row) -> JsonObject:
        self._captured.clear([row])
        found = await self._calls.play(row)
        if not isinstance(found.get("reward"), int | float) and not found.get(NO_PERSIST):
            shown = orjson.dumps(found)[:REASON_CHARS].decode(errors="replace")
            raise RowFailed(RowFailure.of(FailureClass.BAD_ANSWER, f"the answer has no reward: {shown}"))
        return found


def _labelled(row: Row, answer: JsonObject) -> JsonObject:
    task, rollout = key_of(row)
    answer |= {TASK_INDEX: task, ROLLOUT_INDEX: rollout, AGENT_REF: row[AGENT_REF]}
    answer |= {name: row[name] for name in _CARRIED if name in row}
    return answer


T = TypeVar("T")
R = TypeVar("R")


async def as_finished(do: Callable[[T], Awaitable[R]], things: Sequence[T], concurrency: int) -> AsyncGenerator[R]:
    """Yields results in the order they are finished. Cancels running work when it is closed, or when `do` raises."""
    left = iter(things)
    finished: asyncio.Queue[R | Exception] = asyncio.Queue()

    async def work() -> None:
        for one in left:
            try:
                finished.put_nowait(await do(one))
            except Exception as error:  # boundary: passed on to the consumer
                finished.put_nowait(error)

    workers = [asyncio.create_task(work(), name="as-finished") for _ in range(min(concurrency, len(things)))]
    try:
        for _ in things:
            result = await finished.get()
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
