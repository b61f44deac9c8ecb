"""Plays one rollout with the servers of a gym: posts its row to its agent, and retries where that may help.

Owns: sampling parameters of a row, its attempts and its time limit. Never touches: the meaning of the answer.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count

from msgspec import Struct

from palestra.chat import ChatTokenizer
from palestra.config.environment_entries import GymEntry, gym_entry
from palestra.config.train import GrpoConfig
from palestra.environments.gym.errors import RowFailed
from palestra.environments.gym.playing import RowCalls, pause_s
from palestra.environments.gym.rows import ROW
from palestra.net.http_client import HttpClient
from palestra.training.policy import PolicySampler
from palestra.training.rollouts.gym_results import fill
from palestra.training.rollouts.gym_servers import PolicyAddress, open_gyms
from palestra.training.rollouts.rollout_loop import RolloutSettings
from palestra.training.rollouts.sources import ERROR_LENGTH, blank_rollout
from palestra.training.rollouts.stopwatch import RolloutOutOfTime, RolloutStopwatch
from palestra.training.session import TrainingSession
from palestra.types.gym import (
    ATTEMPT_INDEX,
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


class GymPlayer(Struct, frozen=True):
    """Plays the rows of one entry of the config."""

    calls: RowCalls
    entry: GymEntry
    extras: JsonObject
    """Fields of the entry that are added to each row."""
    policy: PolicyAddress
    tokenizer: ChatTokenizer

    async def play(
        self, request: GroupRequest, index: int, sampler: PolicySampler, settings: RolloutSettings
    ) -> Rollout:
        """Plays a rollout. Always returns a record, whatever happens to the servers."""
        rollout = blank_rollout(request, index, request.seeds[index])
        rollout.temperature = settings.temperature
        rollout.messages = list(request.task.prompt)
        watch = RolloutStopwatch(settings.timeout_s)
        row = {**request.task.extras[ROW], **self.extras}
        try:
            posted = sampling_row(row, request, index, sampler.model, settings)
            result = await watch.run(play_row(self.calls, posted, self.entry.attempts))
            self._check_weights(result, sampler)
        except RolloutOutOfTime as late:
            rollout.stop, rollout.error, rollout.failure = RolloutStop.TIMEOUT, str(late), FailureClass.TIMEOUT
        except RowFailed as error:
            rollout.stop, rollout.failure = RolloutStop.ENV_FAILED, error.failure.kind
            rollout.error = " ".join(str(error).split())[:ERROR_LENGTH]
        else:
            fill(rollout, result, self.tokenizer, sampler.version)
        rollout.seconds = watch.spent_s
        return rollout

    def _check_weights(self, result: JsonMapping, sampler: PolicySampler) -> None:
        """Checks that the run's own weights have answered. To learn from another model's answer would be wrong, and
        nothing else would reveal it."""
        response = result.get("response")
        model = response.get("model") if isinstance(response, Mapping) else None
        if isinstance(model, str) and model not in (sampler.model, self.policy.alias):
            said = f"policy_model_name={self.policy.alias} policy_base_url={self.policy.api}"
            alias_text = said if self.policy.alias else "an alias of this run's (alias=NAME in its config)"
            reason = f"model {model!r} has answered instead of this run's weights; start the gym with {alias_text}"
            raise RowFailed(RowFailure.of(FailureClass.BAD_ANSWER, reason))


async def play_row(calls: RowCalls, row: JsonObject, attempts: int) -> JsonMapping:
    """Returns the agent's result. Raises RowFailed if all attempts have failed."""
    for failed in count(1):
        try:
            result = await calls.play(row)
            _check_kept(result)
            return result
        except RowFailed as error:
            # and this attempt has already waited for it
            is_away = error.failure.kind == FailureClass.SERVER_UNREACHABLE
            if error.failure.is_final or is_away or failed >= attempts:
                raise
        await asyncio.sleep(pause_s(failed))
        row = {**row, ATTEMPT_INDEX: failed}
    raise AssertionError


def _check_kept(result: JsonMapping) -> None:
    if result.get(NO_PERSIST):
        reason = f"its agent asks not to store it ({NO_PERSIST})"
        raise RowFailed(RowFailure(kind=FailureClass.NOT_KEPT, reason=reason, is_final=True))


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


@asynccontextmanager
async def open_gym_players(config: GrpoConfig, session: TrainingSession) -> AsyncIterator[dict[str, GymPlayer]]:
    """Opens players by the name of their entry; there are none if a run has no gym."""
    policy = PolicyAddress(session.url, config.alias, config.model.name)
    logs, note = session.run.path / "logs", session.listener.note
    async with HttpClient() as client, open_gyms(config.environments, policy, logs, client, note) as gyms:
        yield {
            entry.name: GymPlayer(
                RowCalls(client, gyms[entry.name], AWAY_S), gym_entry(entry), entry.extras, policy, session.tokenizer
            )
            for entry in config.environments
            if entry.name in gyms
        }
