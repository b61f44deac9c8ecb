"""Plays rollouts of an evaluation with verifiers, which calls the evaluated model itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments.errors import EnvironmentFailure
from palestra.environments.verifiers.host_process import VerifiersHost
from palestra.net.chat_apis import ModelEndpoint
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.sources import ERROR_LENGTH
from palestra.rollouts.verifiers.outcomes import VerifiersOutcome, attempt_of, request_of
from palestra.rollouts.verifiers.player import open_verifiers_hosts
from palestra.types import StopReason
from palestra.types.rollouts import PROMPT_TOKENS, SAMPLED_TOKENS, GroupRequest, Rollout, RolloutStop, Turn


class VerifiersEvaluationPlayer:
    """Plays the rollouts of one entry of the config."""

    def __init__(self, host: VerifiersHost, endpoint: ModelEndpoint, settings: RolloutSettings) -> None:
        self._host, self._endpoint, self._settings = host, endpoint, settings
        self._groups: dict[str, asyncio.Task[list[VerifiersOutcome]]] = {}
        """Groups that are graded together, by their requests: the first of their rollouts plays them all."""

    async def play(self, request: GroupRequest, rollout: Rollout) -> Rollout:
        """Fills the record of a rollout, whatever happens."""
        began = time.monotonic()
        rollout.messages = list(request.task.prompt)
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._host.start()
                _fill(rollout, await self._outcome(request, rollout.index))
        except TimeoutError:
            rollout.stop = RolloutStop.TIMEOUT
            rollout.error = f"it took longer than {self._settings.timeout_s:g} s (timeout_s)"
        except EnvironmentFailure as error:
            rollout.stop, rollout.error = RolloutStop.ENV_FAILED, str(error)[:ERROR_LENGTH]
        rollout.seconds = time.monotonic() - began
        return rollout

    async def _outcome(self, request: GroupRequest, index: int) -> VerifiersOutcome:
        if not self._host.is_grouped:
            (outcome,) = await self._play(request, [request.seeds[index]])
            return outcome
        if request.id not in self._groups:
            playing = self._play(request, list(request.seeds))
            self._groups[request.id] = asyncio.create_task(playing, name=request.id)
        return (await asyncio.shield(self._groups[request.id]))[index]

    async def _play(self, request: GroupRequest, seeds: list[int]) -> list[VerifiersOutcome]:
        endpoint = self._endpoint
        params = request_of(request.task, self._settings, endpoint.base_url, endpoint.model)
        attempts = [attempt_of(endpoint.api_key, seed) for seed in seeds]
        return msgspec.convert(await self._host.call("play", **params, attempts=attempts), list[VerifiersOutcome])


def _fill(rollout: Rollout, outcome: VerifiersOutcome) -> None:
    tokens = {PROMPT_TOKENS: float(outcome.read), SAMPLED_TOKENS: float(outcome.sampled)}
    rollout.metrics, rollout.verdict = outcome.numbers | tokens, outcome.verdict
    rollout.messages = outcome.messages or rollout.messages
    rollout.turns = [
        Turn(
            observation=[], tokens=[], logprobs=[], stop=StopReason.STOP, version=0, text=str(one.get("content") or "")
        )
        for one in outcome.messages
        if one["role"] == "assistant"
    ]
    if (problem := outcome.problem) is not None:
        rollout.stop = RolloutStop.ENV_FAILED
        rollout.error = " ".join(f"{problem.type}: {problem.message}".split())[:ERROR_LENGTH]
        return
    rollout.stop = outcome.ending
    if outcome.is_cut and rollout.turns:
        rollout.turns[-1].stop = StopReason.LENGTH
    agents = outcome.agents or {}
    rollout.agent_rewards = agents if outcome.reward is None else {}
    rollout.reward = sum(agents.values()) / len(agents) if outcome.reward is None else outcome.reward


@asynccontextmanager
async def open_verifiers_evaluation(
    entries: Iterable[EnvironmentEntry], endpoint: ModelEndpoint, settings: RolloutSettings, logs: Path
) -> AsyncIterator[dict[str, VerifiersEvaluationPlayer]]:
    async with open_verifiers_hosts(entries, logs) as hosts:
        yield {name: VerifiersEvaluationPlayer(host, endpoint, settings) for name, host in hosts.items()}
