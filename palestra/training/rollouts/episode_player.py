"""Plays one episode of the server with an environment: in the trainer, or in `palestra episode play`.

Owns: the chat calls for its turns, its result. Never touches: the loop (`rollout_loop`), claiming and leases; tokens,
which the server stores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from palestra.environments.errors import UnknownEnvironment
from palestra.episodes import AsyncEpisode, EpisodeError, EpisodeResult
from palestra.training.rollouts.episode_calls import AttemptModelCalls, CallRefused
from palestra.training.rollouts.episode_rollouts import MESSAGES, STOP, UNGRADED
from palestra.training.rollouts.rollout_loop import (
    Environments,
    PlayedRollout,
    PolicyTurn,
    RolloutEnded,
    RolloutSettings,
    play,
)
from palestra.training.rollouts.stopwatch import RolloutStopwatch
from palestra.training.seeds import derive_seed
from palestra.types.rollouts import Message, RolloutStop

LARGEST_TRANSCRIPT = 256 * 1024
"""Largest size in bytes of the conversation in a result, which may have 1 MiB. A longer conversation is decoded from
the tokens instead."""
SETTING_NAMES = ("max_tokens", "max_context", "temperature", "top_p", "top_k", "timeout_s")


def sampling_tags(settings: RolloutSettings) -> dict[str, str]:
    """Returns tags that tell players how to make an episode's model calls."""
    fields = msgspec.to_builtins(settings)
    return {name: repr(fields[name]) for name in SETTING_NAMES}


def settings_of(tags: Mapping[str, str], otherwise: RolloutSettings) -> RolloutSettings:
    """Reads the settings from the tags of an episode; returns `otherwise` if its trainer sent none, or none that are
    numbers."""
    fields = {name: tags[name] for name in SETTING_NAMES if name in tags}
    try:
        return msgspec.convert({**msgspec.to_builtins(otherwise), **fields}, RolloutSettings, strict=False)
    except msgspec.ValidationError:
        return otherwise


class EnvironmentPlayer:
    """Plays episodes for the client library's pool: call it with an episode."""

    def __init__(
        self, environments: Environments, settings: RolloutSettings, on_unknown: Callable[[str], None] | None = None
    ) -> None:
        """`on_unknown` is called with the name of an environment that is not installed here; its task is released for
        another player."""
        self._environments, self._settings, self._on_unknown = environments, settings, on_unknown

    async def __call__(self, episode: AsyncEpisode) -> EpisodeResult | None:
        try:
            session = self._environments.open(episode.task)
        except UnknownEnvironment as error:
            await episode.release(str(error))
            if self._on_unknown is not None:
                self._on_unknown(str(error))
            return None
        settings = settings_of(episode.tags, self._settings)
        try:
            async with AttemptModelCalls(episode) as calls:
                turn_sampler = ChatTurnSampler(episode, calls, settings)
                played = await play(session, episode.task, turn_sampler, settings.timeout_s)
            return _result(played, turn_sampler.messages, await session.metrics())
        finally:
            await session.close()


class ChatTurnSampler:
    """Samples turns by chat calls to the server, which stores the tokens."""

    def __init__(self, episode: AsyncEpisode, calls: AttemptModelCalls, settings: RolloutSettings) -> None:
        self._episode, self._calls, self._settings = episode, calls, settings
        self.messages: list[Message] = []
        self._used = 0
        """Number of tokens of the conversation so far."""

    def begin(self, messages: Sequence[Message]) -> None:
        self.messages = list(messages)

    async def sample_turn(self, turn: int, watch: RolloutStopwatch) -> PolicyTurn:
        """Samples a turn. Raises EpisodeClientError if the attempt is over and the server will not accept a result."""
        settings = self._settings
        room = max(1, settings.max_context - self._used)
        try:
            answer = await self._calls.chat(
                self.messages,
                watch.left_s,
                max_tokens=min(settings.max_tokens, room),
                seed=derive_seed(self._episode.seed, turn),
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
            )
        except CallRefused as error:
            raise RolloutEnded(
                RolloutStop.CONTEXT if error.is_used_up else RolloutStop.SAMPLING_FAILED, error
            ) from None
        except TimeoutError:
            raise RolloutEnded(RolloutStop.TIMEOUT, watch.over()) from None
        watch.spent_s += answer.seconds
        self.messages.append(answer.message)
        self._used = answer.tokens
        return PolicyTurn(answer.text, answer.stop)

    def observe(self, messages: Sequence[Message]) -> None:
        self.messages += messages

    def go_on(self, observations: Sequence[Message], history: list[Message] | None) -> None:
        if history is not None:
            self.messages = list(history)
        limit = self._settings.max_context
        if self._used >= limit:
            error = f"{self._used} tokens: no room for a turn in {limit} (rollout.max_context)"
            raise RolloutEnded(RolloutStop.CONTEXT, error)


def _result(played: PlayedRollout, messages: list[Message], metrics: dict[str, float]) -> EpisodeResult:
    stop, failure = played.stop, None
    if played.is_ungraded or not (played.rewards or stop.is_failure):
        reason = played.error or "its environment gave no reward"
        failure = EpisodeError(type=stop if stop.is_failure else UNGRADED, message=reason)
    elif stop.is_failure:
        failure = EpisodeError(type=stop, message=played.error or "")
    return EpisodeResult(
        reward=None if failure else played.reward,
        step_rewards=played.rewards,
        metrics=metrics,
        metadata={STOP: stop, **_transcript(messages)},
        error=failure,
    )


def _transcript(messages: list[Message]) -> dict[str, list[Message]]:
    try:
        is_short = len(msgspec.json.encode(messages)) <= LARGEST_TRANSCRIPT
    except (TypeError, ValueError):
        is_short = False
    return {MESSAGES: messages} if is_short else {}
