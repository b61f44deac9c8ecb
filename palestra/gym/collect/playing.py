"""One row played by its agent: asked, asked again where that may help, and in the end a result or failures.

Owns: the call, its time limit, what is tried again and how often. Never touches: files, the order of rows.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import orjson
from msgspec import Struct, field

from palestra.gym.collect.directory import Directory
from palestra.gym.collect.errors import CollectError, UnknownAgent
from palestra.gym.collect.folding import Captured
from palestra.gym.collect.rows import Row, agent_of, key_of
from palestra.gym.http_client import CallFailed, HttpClient, HttpReply, NoConnection
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
from palestra.types.gym_failures import REASON_CHARS, Failure, FailureClass, run_failure

RUN_LIMIT_S = 3_600.0
LOST_LIMIT_S = 180.0  # a server that builds its environment anew takes minutes; one that starts again, seconds
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_CARRIED = ("skills_ref", ATTEMPT_INDEX, ROLLOUT_ID)


class Patience(Struct, frozen=True, kw_only=True):
    attempts: int = 3
    """Of rollouts that fail. Those lost with their server have as many of their own."""
    lost: int = 5
    run_limit_s: float = RUN_LIMIT_S
    lost_limit_s: float = LOST_LIMIT_S
    """How long a server may be away before its rows fail."""


class Played(Struct, kw_only=True):
    """What became of a row."""

    row: Row
    result: dict[str, Any] | None = None
    """The agent's answer with its indices; None: it failed, or wants to be nowhere."""
    failures: list[dict[str, Any]] = field(default_factory=list)
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
        self._client = client
        self._directory = directory
        self._patience = patience or Patience()
        self._captured = captured or Captured()

    def check(self, rows: Iterable[Row]) -> None:
        """Raises CollectError for an agent that the gym does not have."""
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
            await asyncio.sleep(_pause(lost + tries - failed_before - 1))

    async def _attempt(self, row: Row) -> dict[str, Any]:
        name = agent_of(row) or ""
        body = orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            async with asyncio.timeout(self._patience.run_limit_s):
                reply = await self._asked(name, body)
        except TimeoutError:
            return _failed(row, FailureClass.TIMEOUT, f"no answer within {self._patience.run_limit_s:g} s")
        except UnknownAgent as error:
            return _failed(row, FailureClass.UNKNOWN_AGENT, str(error))
        except NoConnection as error:
            return _failed(row, FailureClass.SERVER_UNREACHABLE, f"{name} is away: {error}")
        except CallFailed as error:
            return _failed(row, FailureClass.SERVER_DIED, f"{name}: {error}")
        return _outcome(row, reply)

    async def _asked(self, name: str, body: bytes) -> HttpReply:
        """A server that is not there is waited for: the row has not begun. It may come back elsewhere."""
        loop = asyncio.get_running_loop()
        until, pauses = loop.time() + self._patience.lost_limit_s, 0
        while True:
            try:
                return await self._client.post(f"{self._directory.agent(name)}/run", body)
            except NoConnection:
                if loop.time() > until:
                    raise
            await asyncio.sleep(_pause(pauses))
            pauses += 1
            with suppress(CollectError):  # the head may be away as well
                await self._directory.refresh()


def _outcome(row: Row, reply: HttpReply) -> dict[str, Any]:
    """The result, or the failure it tells of."""
    if reply.status >= 400:
        return _labelled(row, run_failure(agent_of(row) or "", reply.status, reply.body).fields())
    try:
        found = reply.json()
    except ValueError:
        found = None
    shown = reply.body[:REASON_CHARS].decode(errors="replace")
    if not isinstance(found, dict):
        return _failed(row, FailureClass.BAD_ANSWER, f"not a JSON object: {shown}")
    if not found.get(FAILURE_CLASS):
        found.pop(FAILURE_CLASS, None)
        if not isinstance(found.get("reward"), int | float) and not found.get(NO_PERSIST):
            return _failed(row, FailureClass.BAD_ANSWER, f"no reward in it: {shown}")
    return _labelled(row, found)


def _failed(row: Row, kind: FailureClass, reason: str) -> dict[str, Any]:
    return _labelled(row, Failure.of(kind, reason).fields())


def _labelled(row: Row, answer: dict[str, Any]) -> dict[str, Any]:
    task, rollout = key_of(row)
    answer |= {TASK_INDEX: task, ROLLOUT_INDEX: rollout, AGENT_REF: row[AGENT_REF]}
    answer |= {name: row[name] for name in _CARRIED if name in row}
    return answer


def _pause(number: int) -> float:
    return BACKOFF_S[min(number, len(BACKOFF_S) - 1)] * random.uniform(0.5, 1.0)
