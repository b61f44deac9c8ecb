"""Plays rollouts of a training run with the servers of a gym."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from msgspec import Struct

from palestra.chat import ChatTokenizer
from palestra.config.environment_entries import EnvironmentEntry, GymEntry, gym_entry
from palestra.config.train import GrpoConfig
from palestra.environments.gym.directory import ServerDirectory
from palestra.environments.gym.errors import RowFailed
from palestra.environments.gym.rows import ROW
from palestra.net.http_client import HttpClient
from palestra.rollouts.gym.pictures import show_pictures
from palestra.rollouts.gym.results import NotTrainable, fill
from palestra.rollouts.gym.row_calls import RetryPolicy, RowCalls, row_attempts
from palestra.rollouts.gym.servers import PolicyAddress, open_gyms
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.sources import ERROR_LENGTH, PlayedRun, blank_rollout
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


class GymPlayer(Struct, frozen=True):
    """Plays the rows of one entry of the config."""

    rows: GymRows
    policy: PolicyAddress
    tokenizer: ChatTokenizer

    async def play(
        self, request: GroupRequest, index: int, sampler: PolicySampler, settings: RolloutSettings
    ) -> Rollout:
        """Plays a rollout. Always returns a record, whatever happens to the servers."""
        rollout = blank_rollout(request, index, request.seeds[index])
        rollout.temperature = settings.temperature

        def take(result: JsonMapping) -> None:
            self._check_weights(result, sampler)
            fill(rollout, result, self.tokenizer, sampler.version)
            if rollout.turns:
                given = request.task.extras[ROW].get(PARAMS, {}).get("input")
                show_pictures(rollout, given, result["response"]["output"], self.tokenizer)

        await self.rows.play(request, rollout, sampler.model, settings, take)
        return rollout

    def _check_weights(self, result: JsonMapping, sampler: PolicySampler) -> None:
        """Checks that the run's own weights have answered. To learn from another model's answer would be wrong, and
        nothing else would reveal it."""
        response = result.get("response")
        model = response.get("model") if isinstance(response, Mapping) else None
        if isinstance(model, str) and model not in (sampler.model, self.policy.alias):
            settings_text = f"policy_model_name={self.policy.alias} policy_base_url={self.policy.api}"
            alias_text = settings_text if self.policy.alias else "an alias of this run's (alias=NAME in its config)"
            reason = f"model {model!r} has answered instead of this run's weights; start the gym with {alias_text}"
            raise RowFailed(RowFailure.of(FailureClass.BAD_ANSWER, reason))


@asynccontextmanager
async def open_gym_players(config: GrpoConfig, session: PlayedRun) -> AsyncIterator[dict[str, GymPlayer]]:
    """Opens players by the name of their entry; there are none if a run has no gym."""
    policy = PolicyAddress(session.url, config.alias, config.model.name)
    logs, note = session.run.path / "logs", session.listener.note
    async with HttpClient() as client, open_gyms(config.environments, policy, logs, client, note) as gyms:
        yield {
            entry.name: GymPlayer(GymRows.of(entry, client, gyms[entry.name]), policy, session.tokenizer)
            for entry in config.environments
            if entry.name in gyms
        }


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
