"""The row of a rollout: posted with sampling parameters of its own, and what failed noted in the record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from msgspec import Struct

from palestra.config.environment_entries import EnvironmentEntry, GymEntry, gym_entry
from palestra.environments.gym.directory import ServerDirectory
from palestra.environments.gym.errors import RowFailed
from palestra.environments.gym.rows import ROW
from palestra.net.http_client import HttpClient
from palestra.rollouts.gym.results import NotTrainable
from palestra.rollouts.gym.row_calls import RowCalls
from palestra.rollouts.gym.row_retries import RetryPolicy, row_attempts
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.sources import ERROR_LENGTH
from palestra.rollouts.stopwatch import RolloutOutOfTime, RolloutStopwatch
from palestra.types.gym import (
    EXTRA_BODY,
    NO_PERSIST,
    PARAMS,
    POLICY,
    ROLLOUT_ID,
    ROLLOUT_INDEX,
    ROLLOUT_SEED,
    TASK_INDEX,
)
from palestra.types.gym_failures import FailureClass, RowFailure
from palestra.types.rollouts import GroupRequest, Rollout, RolloutStop
from palestra.util.json_types import JsonMapping, JsonObject

AWAY_S = 60.0  # restarting a server takes seconds, on another node a little longer
NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._-]")


class GymRows(Struct, frozen=True):
    """Rows of one entry of the config."""

    calls: RowCalls
    entry: GymEntry
    extras: JsonObject
    """Fields of the entry that are added to each row."""

    @classmethod
    def of(cls, entry: EnvironmentEntry, client: HttpClient, gym: ServerDirectory) -> GymRows:
        return cls(RowCalls(client, gym, AWAY_S), gym_entry(entry), entry.extras)

    async def play(
        self,
        request: GroupRequest,
        rollout: Rollout,
        model: str,
        settings: RolloutSettings,
        take: Callable[[JsonMapping], None],
    ) -> None:
        """Plays a rollout's row and hands the answer to `take`, which may raise RowFailed and NotTrainable. Whatever
        happens to the servers is noted in the record."""
        rollout.messages = list(request.task.prompt)
        row = sampling_row({**request.task.extras[ROW], **self.extras}, request, rollout.index, model, settings)
        watch = RolloutStopwatch(settings.timeout_s)
        try:
            take(await watch.run(self._answer(row)))
        except RolloutOutOfTime as late:
            rollout.stop, rollout.error, rollout.failure = RolloutStop.TIMEOUT, str(late), FailureClass.TIMEOUT
        except RowFailed as error:
            rollout.stop, rollout.failure = RolloutStop.ENV_FAILED, error.failure.kind
            rollout.error = " ".join(str(error).split())[:ERROR_LENGTH]
        except NotTrainable as error:
            rollout.stop, rollout.error = error.stop, " ".join(str(error).split())[:ERROR_LENGTH]
        rollout.seconds = watch.spent_s

    async def _answer(self, row: JsonObject) -> JsonMapping:
        """Returns the agent's answer. Raises RowFailed if all attempts have failed."""
        # A server that died counts as an attempt; one that was waited for in vain is not waited for again.
        policy = RetryPolicy(
            attempts=self.entry.attempts,
            lost=0,
            run_limit_s=None,
            not_again=frozenset({FailureClass.SERVER_UNREACHABLE}),
        )
        *_, last = [attempt async for attempt in row_attempts(self.calls.play, row, policy)]
        if last.failure is not None:
            raise last.failure
        if last.result.get(NO_PERSIST):
            reason = f"its agent asks not to store it ({NO_PERSIST})"
            raise RowFailed(RowFailure(kind=FailureClass.NOT_KEPT, reason=reason, is_final=True))
        return last.result


def sampling_row(
    row: JsonMapping, request: GroupRequest, index: int, model: str, settings: RolloutSettings
) -> JsonObject:
    """Returns the row as it is posted: with this run's sampling parameters instead of its own."""
    params = dict(row[PARAMS])
    metadata = dict(params.get("metadata") or {})
    extra = json.loads(metadata.get(EXTRA_BODY) or "{}")
    extra.pop("seed", None)  # with a seed of the row, all rollouts of its group would be the same
    if settings.top_k > 0:
        extra["top_k"] = settings.top_k
    metadata |= {EXTRA_BODY: json.dumps(extra), POLICY: model, ROLLOUT_SEED: str(request.seeds[index])}
    params |= {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_output_tokens": min(params.get("max_output_tokens") or settings.max_tokens, settings.max_tokens),
        "metadata": metadata,
    }
    return {
        **row,
        PARAMS: params,
        TASK_INDEX: request.position,
        ROLLOUT_INDEX: index,
        ROLLOUT_ID: NOT_IN_IDS.sub("_", f"s{request.step}-{request.id}-{index}"),
    }
