"""Posts one row to its agent, tries it again after a failure that may pass, and returns the answer or the class of
its failure: when collecting, training and evaluating."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress

import orjson
from msgspec import Struct

from palestra.environments.gym.directory import ServerDirectory
from palestra.environments.gym.errors import NoGym, RowFailed, UnknownAgent
from palestra.net.http_client import CallFailed, HttpClient, HttpReply, NoConnection
from palestra.types.gym import AGENT_REF, ATTEMPT_INDEX, FAILURE_CLASS
from palestra.types.gym_failures import REASON_CHARS, FailureClass, RowFailure, run_failure
from palestra.util.backoff import Backoff
from palestra.util.json_types import JsonObject

AWAY_S = 180.0  # a server that rebuilds its environment takes minutes; one that only restarts, seconds
BACKOFF = Backoff(0.5, 8.0, spread=0.5)


class RowCalls:
    """Makes the calls. It has no state except for the connection pool."""

    def __init__(self, client: HttpClient, directory: ServerDirectory, away_s: float = AWAY_S) -> None:
        """`away_s`: how long a server may be unreachable before its rows fail."""
        self._client, self._directory, self._away_s = client, directory, away_s

    async def play(self, row: JsonObject) -> JsonObject:
        """Plays a row. Raises RowFailed."""
        name = row[AGENT_REF]["name"]
        try:
            reply = await self._post(name, orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY))
        except UnknownAgent as error:
            raise _failed(FailureClass.UNKNOWN_AGENT, str(error)) from None
        except NoConnection as error:
            raise _failed(FailureClass.SERVER_UNREACHABLE, f"{name} cannot be reached: {error}") from error
        except CallFailed as error:
            raise _failed(FailureClass.SERVER_DIED, f"{name}: {error}") from error
        if reply.status >= 400:
            raise RowFailed(run_failure(name, reply.status, reply.body))
        return _usable(reply)

    async def _post(self, name: str, body: bytes) -> HttpReply:
        """Posts the row. A server that is not reachable is waited for, because the row has not begun. It may come back
        at another address."""
        until, pauses = time.monotonic() + self._away_s, BACKOFF.pauses()
        while True:
            try:
                return await self._client.post(f"{self._directory.agent(name)}/run", body)
            except NoConnection:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(next(pauses))
            with suppress(NoGym):  # the head server may be unreachable as well
                await self._directory.refresh()


def _usable(reply: HttpReply) -> JsonObject:
    try:
        found = reply.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        shown = reply.body[:REASON_CHARS].decode(errors="replace")
        raise _failed(FailureClass.BAD_ANSWER, f"its answer is not a JSON object: {shown}")
    if failure := RowFailure.stated_in(found):
        raise RowFailed(failure, found)
    found.pop(FAILURE_CLASS, None)  # an empty one
    return found


def _failed(kind: FailureClass, reason: str) -> RowFailed:
    return RowFailed(RowFailure.of(kind, reason))


RUN_LIMIT_S = 3_600.0


class RetryPolicy(Struct, frozen=True, kw_only=True):
    attempts: int = 3
    """How often a failing row is played."""
    lost: int = 5
    """How often it is played in addition, because its server died under it."""
    run_limit_s: float | None = RUN_LIMIT_S
    """How long an attempt may take; None: as long as it likes."""
    lost_limit_s: float = AWAY_S
    """How long a server may be unreachable before an attempt fails."""
    not_again: frozenset[str] = frozenset()
    """Classes of failures that end the row at once, beside those that are final."""


class RowAttempt(Struct, frozen=True):
    row: JsonObject
    """As it was posted, with the attempt's number from the second one on."""
    result: JsonObject
    """The agent's answer. If the attempt failed, it says why in the fields of a failure."""
    failure: RowFailed | None = None


async def row_attempts(
    play: Callable[[JsonObject], Awaitable[JsonObject]], row: JsonObject, policy: RetryPolicy, failed_before: int = 0
) -> AsyncGenerator[RowAttempt]:
    """Plays a row until it succeeds or another attempt would not help, and yields each attempt. `play` raises
    RowFailed. `failed_before`: attempts that failed earlier, in another process perhaps."""
    failed, lost = failed_before, 0
    while True:
        posted = {**row, ATTEMPT_INDEX: failed + lost} if failed + lost else row
        try:
            async with asyncio.timeout(policy.run_limit_s):
                result = await play(posted)
        except TimeoutError:
            failure = RowFailed(RowFailure.of(FailureClass.TIMEOUT, f"no answer within {policy.run_limit_s:g} s"))
        except RowFailed as error:
            failure = error
        else:
            yield RowAttempt(posted, result)
            return
        yield RowAttempt(posted, failure.answer, failure)
        if failure.failure.kind == FailureClass.SERVER_DIED and lost < policy.lost:
            lost += 1
        else:
            failed += 1
        is_final = failure.failure.is_final or failure.failure.kind in policy.not_again
        if is_final or failed >= policy.attempts:
            return
        await asyncio.sleep(BACKOFF.after(failed + lost - failed_before))
