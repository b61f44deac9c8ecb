"""Plays one episode of the server with an environment: in the trainer, or in `palestra episode play`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import zip_longest
from typing import Protocol

import msgspec

from palestra.environments.errors import UnknownEnvironment
from palestra.episodes import AsyncEpisode, EpisodeApiError, EpisodeError, EpisodeResult, NotPlayedHere
from palestra.net.chat_apis import OpenAIChat
from palestra.rollouts.endpoint.chat_turns import ChatTurnSampler
from palestra.rollouts.endpoint.model_calls import ModelCalls
from palestra.rollouts.episodes.reader import UNGRADED
from palestra.rollouts.rollout_loop import Environments, PlayedRollout, RolloutSettings, play
from palestra.types.episodes import ResultKey
from palestra.util.json_types import JsonObject

CALL = "POST /chat/completions"
LARGEST_TRANSCRIPT = 256 * 1024
"""Largest size in bytes of the conversation in a result, and of a verdict; the result may have 1 MiB. A longer
conversation is decoded from the tokens instead."""
SETTING_NAMES = (
    *("max_tokens", "max_context", "temperature", "top_p", "top_k", "timeout_s"),
    *("max_tool_calls", "max_parse_failures", "grades_timeouts"),
)


def sampling_tags(settings: RolloutSettings) -> dict[str, str]:
    """Returns tags that tell players how to make an episode's model calls."""
    given = {name: getattr(settings, name) for name in SETTING_NAMES}
    return {name: json.dumps(value) for name, value in given.items() if value is not None}


def settings_of(tags: Mapping[str, str], otherwise: RolloutSettings) -> RolloutSettings:
    """Reads the settings from the tags of an episode; returns `otherwise` if its trainer sent none, or none that are
    numbers."""
    types = {field.name: field.type for field in msgspec.structs.fields(RolloutSettings)}
    try:
        given = {name: msgspec.convert(tags[name], types[name], strict=False) for name in SETTING_NAMES if name in tags}
    except msgspec.ValidationError:
        return otherwise
    return msgspec.structs.replace(otherwise, **given)


class EpisodePlayer(Protocol):
    async def __call__(self, episode: AsyncEpisode, settings: RolloutSettings) -> EpisodeResult: ...


class EnvironmentPlayer:
    """Plays episodes for the client library's pool: call it with an episode."""

    def __init__(
        self, environments: Environments, settings: RolloutSettings, others: Mapping[str, EpisodePlayer] | None = None
    ) -> None:
        """`others` play the episodes of environments that are not played turn by turn here, by the environment's
        name."""
        self._environments, self._settings, self._others = environments, settings, others or {}

    async def __call__(self, episode: AsyncEpisode) -> EpisodeResult:
        if (other := self._others.get(episode.task.environment)) is not None:
            return await other(episode, settings_of(episode.tags, self._settings))
        try:
            session = self._environments.open(episode.task)
        except UnknownEnvironment as error:
            raise NotPlayedHere(str(error)) from error
        settings = settings_of(episode.tags, self._settings)
        try:
            async with ModelCalls(EpisodeCaller(episode)) as calls:
                turn_sampler = ChatTurnSampler(calls, settings, episode.seed)
                played = await play(session, episode.task, turn_sampler, settings)
            seconds = (answer.seconds for answer in turn_sampler.answers)
            metadata: JsonObject = {
                ResultKey.MESSAGES: turn_sampler.messages,
                ResultKey.VERDICT: await session.verdict(),
                ResultKey.TURN_TIMES: [list(one) for one in zip_longest(seconds, played.env_s, fillvalue=0.0)],
            }
            return _result(played, metadata, await session.metrics())
        finally:
            await session.close()


class EpisodeCaller:
    """Makes calls with the key of one attempt, as long as this client holds it."""

    def __init__(self, episode: AsyncEpisode) -> None:
        self._episode = episode
        self.base_url, self.api_key, self.model = episode.base_url, episode.api_key, episode.model
        self.api = OpenAIChat()
        self.call_name = f"{episode.id}#{episode.attempt}"

    def check(self, waited_s: float) -> None:
        if not self._episode.can_continue:
            raise EpisodeApiError(409, self._episode.reason, CALL)

    def over(self, status: int, detail: str) -> EpisodeApiError:
        self._episode.held_lease.lose(detail)
        return EpisodeApiError(status, detail, CALL)


def _result(played: PlayedRollout, metadata: JsonObject, metrics: dict[str, float]) -> EpisodeResult:
    stop, failure = played.stop, None
    if played.is_ungraded or not (played.rewards or played.has_failed):
        reason = played.error or "its environment gave no reward"
        failure = EpisodeError(type=stop if stop.is_failure else UNGRADED, message=reason)
    elif played.has_failed:
        failure = EpisodeError(type=stop, message=played.error or "")
    return EpisodeResult(
        reward=None if failure else played.reward,
        step_rewards=played.rewards,
        metrics=metrics,
        metadata={
            ResultKey.STOP: stop,
            **{name: value for name, value in metadata.items() if value and _is_short(value)},
        },
        error=failure,
    )


def _is_short(value: object) -> bool:
    try:
        return len(msgspec.json.encode(value)) <= LARGEST_TRANSCRIPT
    except (TypeError, ValueError):
        return False
