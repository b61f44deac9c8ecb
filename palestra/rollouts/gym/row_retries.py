"""Tries a row of a gym again after a failure that may pass: when collecting, training and evaluating."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from msgspec import Struct

from palestra.environments.gym.errors import RowFailed
from palestra.rollouts.gym.row_calls import AWAY_S, BACKOFF
from palestra.types.gym import ATTEMPT_INDEX
from palestra.types.gym_failures import FailureClass, RowFailure
from palestra.util.json_types import JsonObject

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
