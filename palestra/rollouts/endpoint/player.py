"""Plays rollouts with a model behind an endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Final, Protocol

from palestra.net.chat_apis import CallAnswer, ModelEndpoint
from palestra.net.chat_apis.errors import EndpointSilent
from palestra.rollouts.endpoint.chat_turns import ChatTurnSampler
from palestra.rollouts.endpoint.model_calls import ModelCalls
from palestra.rollouts.rollout_loop import Environments, PlayedRollout, RolloutSettings, play
from palestra.rollouts.sources import RolloutSourceError, blank_rollout
from palestra.types.rollouts import PROMPT_TOKENS, SAMPLED_TOKENS, GroupRequest, Rollout, Turn


class RolloutPlayer(Protocol):
    async def play(self, request: GroupRequest, rollout: Rollout) -> Rollout:
        """Fills the record of a rollout."""
        ...


class EndpointPlayer:
    """Plays rollouts, at most `settings.concurrency` at a time."""

    def __init__(
        self,
        endpoint: ModelEndpoint,
        environments: Environments,
        settings: RolloutSettings,
        patience_s: float,
        others: Mapping[str, RolloutPlayer],
    ) -> None:
        """`others` are the players of environments that are not played turn by turn here, by the environment's
        name."""
        self._endpoint, self._environments, self._settings = endpoint, environments, settings
        self._others = others
        self._patience_s = patience_s
        self._slots = asyncio.Semaphore(settings.most_at_once)

    async def play(self, request: GroupRequest, index: int) -> Rollout:
        """Plays one rollout. Raises RolloutSourceError if the endpoint cannot be used."""
        rollout = blank_rollout(request, index, request.seeds[index])
        rollout.temperature = self._settings.temperature
        async with self._slots:
            if (other := self._others.get(request.task.environment)) is not None:
                return await other.play(request, rollout)
            session = self._environments.open(request.task)
            try:
                async with ModelCalls(EvaluationCaller(self._endpoint, rollout, self._patience_s)) as calls:
                    sampler = ChatTurnSampler(calls, self._settings, rollout.seed)
                    played = await play(session, request.task, sampler, self._settings)
                metrics, rollout.verdict = await session.metrics(), await session.verdict()
            finally:
                await session.close()
        rollout.messages = sampler.messages
        return _recorded(rollout, played, sampler.answers, metrics)


class EvaluationCaller:
    """Makes the calls of one rollout."""

    def __init__(self, endpoint: ModelEndpoint, rollout: Rollout, patience_s: float) -> None:
        self.base_url: Final = endpoint.base_url
        self.api_key: Final = endpoint.api_key
        self.model: Final = endpoint.model
        self.api: Final = endpoint.api
        self.call_name: Final = f"{rollout.id}-{rollout.seed}-{time.time_ns()}"
        self._patience_s = patience_s

    def check(self, waited_s: float) -> None:
        if waited_s > self._patience_s:
            raise EndpointSilent(f"{self.base_url} has not answered a call for {waited_s:.0f} s; resume when it does")

    def over(self, status: int, detail: str) -> RolloutSourceError:
        return RolloutSourceError(f"{self.base_url} refuses the calls ({status}): {detail}")


def _recorded(rollout: Rollout, played: PlayedRollout, answers: list[CallAnswer], metrics: dict[str, float]) -> Rollout:
    rewards = [*played.rewards, *[0.0] * len(answers)]
    env_s = [*played.env_s, *[0.0] * len(answers)]
    rollout.turns = [
        Turn(
            observation=[],
            tokens=[],
            logprobs=[],
            stop=answer.stop,
            version=0,
            reward=reward,
            text=answer.text,
            sample_s=answer.seconds,
            env_s=seconds,
        )
        for answer, reward, seconds in zip(answers, rewards, env_s, strict=False)
    ]
    rollout.stop, rollout.error = played.stop, played.error
    rollout.seconds, rollout.reward = played.seconds, played.reward
    rollout.metrics = metrics | {
        PROMPT_TOKENS: float(sum(answer.prompt_tokens for answer in answers)),
        SAMPLED_TOKENS: float(sum(answer.sampled_tokens for answer in answers)),
    }
    return rollout
