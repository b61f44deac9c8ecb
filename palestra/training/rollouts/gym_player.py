"""One rollout played by the servers of a gym: its row posted to its agent, asked again where that may help.

Owns: what a row says about sampling, the call, its attempts and its time. Never touches: what its answer means.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
from msgspec import Struct

from palestra.chat import ChatTokenizer
from palestra.config.environment_entries import GymEntry, gym_entry
from palestra.config.train import GrpoConfig
from palestra.environments.gym_rows import ROW
from palestra.training.policy import Sampler
from palestra.training.rollouts.gym_results import fill
from palestra.training.rollouts.gym_servers import Gym, PolicyAddress, open_gyms
from palestra.training.rollouts.play import RolloutSettings
from palestra.training.rollouts.sources import ERROR_LENGTH, blank_rollout
from palestra.training.rollouts.stopwatch import OutOfTime, Stopwatch
from palestra.training.session import Session
from palestra.types.gym import (
    AGENT_REF,
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
from palestra.types.gym_failures import Failure, FailureClass, run_failure
from palestra.types.rollouts import GroupRequest, Rollout, RolloutStop

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 4.0
AWAY_S = 60.0  # a server that is started again takes seconds, one on another node a little longer
NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._-]")


class _Failed(Exception):
    """The attempt came to nothing."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.reason or 'no reason told'}")
        self.failure = failure

    @classmethod
    def of(cls, kind: FailureClass, reason: str) -> _Failed:
        return cls(Failure.of(kind, reason))


class GymPlayer(Struct, frozen=True):
    """Of one entry."""

    gym: Gym
    entry: GymEntry
    extras: dict[str, Any]
    """Of the entry: added to each row."""
    policy: PolicyAddress
    tokenizer: ChatTokenizer
    http: httpx.AsyncClient

    async def play(self, request: GroupRequest, index: int, sampler: Sampler, settings: RolloutSettings) -> Rollout:
        """Always a record, whatever happens to the servers."""
        rollout = blank_rollout(request, index, request.seeds[index])
        rollout.temperature = settings.temperature
        rollout.messages = list(request.task.prompt)
        watch = Stopwatch(settings.timeout_s)
        row = {**request.task.extras[ROW], **self.extras}
        try:
            result = await watch.run(self._result(sampling_row(row, request, index, sampler, settings)))
            self._check_weights(result, sampler)
        except OutOfTime as late:
            rollout.stop, rollout.error, rollout.failure = RolloutStop.TIMEOUT, str(late), FailureClass.TIMEOUT
        except _Failed as error:
            rollout.stop, rollout.failure = RolloutStop.ENV_FAILED, error.failure.kind
            rollout.error = " ".join(str(error).split())[:ERROR_LENGTH]
        else:
            fill(rollout, result, self.tokenizer, sampler.version)
        rollout.seconds = watch.spent_s
        return rollout

    async def _result(self, row: dict[str, Any]) -> Mapping[str, Any]:
        """A server that is away is waited for a while, and asked where it is now."""
        failed, pause_s, away_until = 0, FIRST_PAUSE_S, time.monotonic() + AWAY_S
        while True:
            try:
                return await self._attempt({**row, ATTEMPT_INDEX: failed} if failed else row)
            except _Failed as error:
                is_away = error.failure.kind == FailureClass.SERVER_UNREACHABLE  # it has not begun
                failed += not (is_away and time.monotonic() < away_until)
                if error.failure.is_final or failed >= self.entry.attempts:
                    raise
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)
            with suppress(httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError):  # the head may be away as well
                await self.gym.refresh()

    async def _attempt(self, row: dict[str, Any]) -> Mapping[str, Any]:
        name = row[AGENT_REF]["name"]
        try:
            url = self.gym.agent(name)
        except LookupError as error:
            raise _Failed.of(FailureClass.UNKNOWN_AGENT, str(error.args[0])) from None
        try:
            answer = await self.http.post(f"{url}/run", json=row)
        except (httpx.ConnectError, httpx.InvalidURL) as error:
            raise _Failed.of(FailureClass.SERVER_UNREACHABLE, f"{name} is away: {error}") from error
        except httpx.HTTPError as error:
            raise _Failed.of(FailureClass.SERVER_DIED, f"{name}: {type(error).__name__}: {error}") from error
        if answer.status_code >= 400:
            raise _Failed(run_failure(name, answer.status_code, answer.content))
        return _usable(answer)

    def _check_weights(self, result: Mapping[str, Any], sampler: Sampler) -> None:
        """Whoever else has answered: to learn from it would be wrong, and nothing else would tell."""
        response = result.get("response")
        model = response.get("model") if isinstance(response, Mapping) else None
        if isinstance(model, str) and model not in (sampler.model, self.policy.alias):
            said = f"policy_model_name={self.policy.alias} policy_base_url={self.policy.api}"
            told = said if self.policy.alias else "an alias of this run's (alias=NAME in its config)"
            reason = f"model {model!r} has answered, not this run's weights; start the gym with {told}"
            raise _Failed.of(FailureClass.BAD_ANSWER, reason)


def _usable(answer: httpx.Response) -> Mapping[str, Any]:
    """Raises _Failed where it tells of a failure."""
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _Failed.of(FailureClass.BAD_ANSWER, f"its answer is no JSON object: {answer.text}")
    if failure := Failure.told_in(found):
        raise _Failed(failure)
    if found.get(NO_PERSIST):
        reason = f"its agent does not want it kept ({NO_PERSIST})"
        raise _Failed(Failure(kind=FailureClass.NOT_KEPT, reason=reason, is_final=True))
    return found


def sampling_row(
    row: Mapping[str, Any], request: GroupRequest, index: int, sampler: Sampler, settings: RolloutSettings
) -> dict[str, Any]:
    """The row as it is posted: this run's way to sample in place of its own."""
    params = dict(row[PARAMS])
    metadata = dict(params.get("metadata") or {})
    extra = json.loads(metadata.get(EXTRA_BODY) or "{}")
    extra.pop("seed", None)  # a row's own would make its group's rollouts all the same
    if settings.top_k > 0:
        extra["top_k"] = settings.top_k
    metadata |= {EXTRA_BODY: json.dumps(extra), POLICY: sampler.model, ROLLOUT_SEED: str(request.seeds[index])}
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
async def open_gym_players(config: GrpoConfig, session: Session) -> AsyncIterator[dict[str, GymPlayer]]:
    """By the name of their entry; none where a run has no gym."""
    policy = PolicyAddress(session.url, config.alias, config.model.name)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        httpx.AsyncClient(timeout=None, limits=limits) as http,  # rollout.timeout_s is around each call
        open_gyms(config.environments, policy, session.run.path / "logs", http, session.listener.note) as gyms,
    ):
        yield {
            entry.name: GymPlayer(gyms[entry.name], gym_entry(entry), entry.extras, policy, session.tokenizer, http)
            for entry in config.environments
            if entry.name in gyms
        }
