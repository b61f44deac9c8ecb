"""One row played by its agent: asked, asked again where that may help, and in the end a result or failures.

Owns: the time limit of a row, what is tried again and how often. Never touches: files, the order of rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import orjson
from msgspec import Struct, field

from palestra.environments.gym.directory import Directory
from palestra.environments.gym.errors import RowFailed
from palestra.environments.gym.playing import AWAY_S, RowCalls, pause_s
from palestra.gym.collect.folding import Captured
from palestra.gym.collect.rows import Row, agent_of, key_of
from palestra.gym.records import (
    AGENT_REF,
    ATTEMPT_INDEX,
    FAILURE_CLASS,
    FAILURE_TERMINAL,
    NO_PERSIST,
    ROLLOUT_ID,
    ROLLOUT_INDEX,
    TASK_INDEX,
)
from palestra.net.http_client import HttpClient
from palestra.types.gym_failures import REASON_CHARS, Failure, FailureClass
from palestra.util.json_types import JsonObject

RUN_LIMIT_S = 3_600.0
_CARRIED = ("skills_ref", ATTEMPT_INDEX, ROLLOUT_ID)


class Patience(Struct, frozen=True, kw_only=True):
    attempts: int = 3
    """Of rollouts that fail. Those lost with their server have as many of their own."""
    lost: int = 5
    run_limit_s: float = RUN_LIMIT_S
    lost_limit_s: float = AWAY_S
    """How long a server may be away before its rows fail."""


class Played(Struct, kw_only=True):
    """What became of a row."""

    row: Row
    result: JsonObject | None = None
    """The agent's answer with its indices; None: it failed, or wants to be nowhere."""
    failures: list[JsonObject] = field(default_factory=list)
    """One for each attempt that failed."""

    def give_up(self, why: Exception) -> None:
        """Its result cannot be kept."""
        self.result = None
        failure = Failure(kind=FailureClass.BAD_ANSWER, reason=f"cannot be written: {why}", is_final=True)
        self.failures.append(_labelled(self.row, failure.fields()))


class RowPlayer:
    """Plays rows of a running gym. Stateless but for the connection pool."""

    def __init__(
        self,
        client: HttpClient,
        directory: Directory,
        patience: Patience | None = None,
        captured: Captured | None = None,
    ) -> None:
        self._directory = directory
        self._patience = patience or Patience()
        self._calls = RowCalls(client, directory, self._patience.lost_limit_s)
        self._captured = captured or Captured()

    def check(self, rows: Iterable[Row]) -> None:
        """Raises UnknownAgent for one that the gym does not have."""
        for name in {agent_of(row) or "" for row in rows}:
            self._directory.agent(name)

    async def play(self, row: Row, failed_before: int = 0) -> Played:
        """Never raises but when it is cancelled. `failed_before`: attempts of an earlier run of the collection."""
        played = Played(row=row)
        tries, lost = failed_before, 0
        while True:
            if tries + lost:
                row = {**row, ATTEMPT_INDEX: tries + lost}
            self._captured.clear([row])
            answer = self._captured.into(await self._attempt(row), row)
            if answer.get(NO_PERSIST):
                return played
            if FAILURE_CLASS not in answer:
                played.result = answer
                return played
            played.failures.append(answer)
            if answer[FAILURE_CLASS] == FailureClass.SERVER_DIED and lost < self._patience.lost:
                lost += 1
            else:
                tries += 1
            if answer.get(FAILURE_TERMINAL) or tries >= self._patience.attempts:
                return played
            await asyncio.sleep(pause_s(lost + tries - failed_before - 1))

    async def _attempt(self, row: Row) -> JsonObject:
        """The result, or the failure it tells of."""
        try:
            async with asyncio.timeout(self._patience.run_limit_s):
                found = await self._calls.play(row)
        except TimeoutError:
            return _failed(row, FailureClass.TIMEOUT, f"no answer within {self._patience.run_limit_s:g} s")
        except RowFailed as error:
            return _labelled(row, error.answer)
        if not isinstance(found.get("reward"), int | float) and not found.get(NO_PERSIST):
            shown = orjson.dumps(found)[:REASON_CHARS].decode(errors="replace")
            return _failed(row, FailureClass.BAD_ANSWER, f"no reward in it: {shown}")
        return _labelled(row, found)


def _failed(row: Row, kind: FailureClass, reason: str) -> JsonObject:
    return _labelled(row, Failure.of(kind, reason).fields())


def _labelled(row: Row, answer: JsonObject) -> JsonObject:
    task, rollout = key_of(row)
    answer |= {TASK_INDEX: task, ROLLOUT_INDEX: rollout, AGENT_REF: row[AGENT_REF]}
    answer |= {name: row[name] for name in _CARRIED if name in row}
    return answer
