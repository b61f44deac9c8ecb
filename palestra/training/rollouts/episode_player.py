"""One episode of the server's, played with an environment: by the trainer itself, or by `palestra episode play`.

Owns: the turns of an episode, its time, what its result says. Never touches: claiming and leases; tokens, which the
server keeps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec

from palestra.environments.errors import EnvironmentFailure, UnknownEnvironment
from palestra.environments.session import EnvSession
from palestra.episodes import AsyncEpisode, EpisodeError, EpisodeResult
from palestra.training.rollouts.episode_calls import Answer, CallRefused, ModelCalls
from palestra.training.rollouts.episode_rollouts import MESSAGES, STOP, UNGRADED
from palestra.training.rollouts.player import CHANGED_HISTORY, Environments, RolloutSettings, stop_after
from palestra.training.rollouts.stopwatch import OutOfTime, Stopwatch
from palestra.training.seeds import derive_seed
from palestra.types.rollouts import Message, RolloutStop

T = TypeVar("T")

LARGEST_TRANSCRIPT = 256 * 1024
"""Bytes of the conversation in a result, which may have 1 MiB. A longer one is read off the tokens."""
TOLD = ("max_tokens", "max_context", "temperature", "top_p", "top_k", "timeout_s")


def sampling_tags(settings: RolloutSettings) -> dict[str, str]:
    """How an episode's model calls should be made, as its tags tell players."""
    told = msgspec.to_builtins(settings)
    return {name: repr(told[name]) for name in TOLD}


def settings_of(tags: Mapping[str, str], otherwise: RolloutSettings) -> RolloutSettings:
    """Of a trainer that tells nothing, or not in numbers: those given."""
    told = {name: tags[name] for name in TOLD if name in tags}
    try:
        return msgspec.convert({**msgspec.to_builtins(otherwise), **told}, RolloutSettings, strict=False)
    except msgspec.ValidationError:
        return otherwise


class EnvironmentPlayer:
    """For the client library's pool: call it with an episode."""

    def __init__(
        self, environments: Environments, settings: RolloutSettings, on_unknown: Callable[[str], None] | None = None
    ) -> None:
        """`on_unknown` hears of a task whose environment is not here; it is given back, for a player that has it."""
        self._environments, self._settings, self._on_unknown = environments, settings, on_unknown

    async def __call__(self, episode: AsyncEpisode) -> EpisodeResult | None:
        try:
            session = self._environments.open(episode.task)
        except UnknownEnvironment as error:
            await episode.release(str(error))
            if self._on_unknown is not None:
                self._on_unknown(str(error))
            return None
        game = Game(episode, session, settings_of(episode.tags, self._settings))
        try:
            async with ModelCalls(episode) as calls:
                await game.play(calls)
            return await game.result()
        finally:
            await session.close()


class _Over(Exception):
    def __init__(self, stop: RolloutStop, error: str = "") -> None:
        self.stop, self.error = stop, error


class Game:
    def __init__(self, episode: AsyncEpisode, session: EnvSession, settings: RolloutSettings) -> None:
        self._episode, self._session, self._settings = episode, session, settings
        self._messages: list[Message] = []
        self._rewards: list[float] = []
        self._used = 0
        """Tokens of the conversation so far."""
        self._is_ungraded = False
        self._watch = Stopwatch(settings.timeout_s)
        self._over = _Over(RolloutStop.DONE)

    async def play(self, calls: ModelCalls) -> None:
        """Raises what ends the attempt without a result: EpisodeClientError, where the server will not take one."""
        try:
            await self._begin()
            while True:
                answer = await self._draw(calls)
                await self._step(answer)
        except _Over as over:
            self._over = over
            await self._settle()

    async def result(self) -> EpisodeResult:
        stop, error = self._over.stop, self._over.error
        if self._is_ungraded or not (self._rewards or stop.is_failure):
            reason = error or "its environment gave no reward"
            failure = EpisodeError(type=stop if stop.is_failure else UNGRADED, message=reason)
        else:
            failure = EpisodeError(type=stop, message=error) if stop.is_failure else None
        return EpisodeResult(
            reward=None if failure else sum(self._rewards),
            step_rewards=self._rewards,
            metrics=await self._session.metrics(),
            metadata={STOP: stop, **self._transcript()},
            error=failure,
        )

    async def _begin(self) -> None:
        try:
            self._messages = list(await self._timed(self._session.init(self._episode.task.prompt)))
        except EnvironmentFailure as error:
            raise _Over(RolloutStop.ENV_INIT_FAILED, str(error)) from None

    async def _draw(self, calls: ModelCalls) -> Answer:
        settings = self._settings
        options = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}
        room = max(1, settings.max_context - self._used)
        try:
            answer = await calls.chat(
                self._messages,
                self._watch.left_s,
                max_tokens=min(settings.max_tokens, room),
                seed=derive_seed(self._episode.seed, len(self._rewards)),
                **options,
            )
        except CallRefused as error:
            stop = RolloutStop.CONTEXT if error.is_used_up else RolloutStop.SAMPLING_FAILED
            raise _Over(stop, str(error)) from None
        except TimeoutError:
            raise _Over(RolloutStop.TIMEOUT, str(self._watch.over())) from None
        self._watch.spent_s += answer.seconds
        self._messages.append(answer.message)
        self._used = answer.tokens
        return answer

    async def _step(self, answer: Answer) -> None:
        try:
            result = await self._timed(self._session.step(answer.text))
        except EnvironmentFailure as error:
            raise _Over(RolloutStop.ENV_FAILED, str(error)) from None
        self._rewards.append(result.reward or 0.0)
        self._is_ungraded |= result.reward is None
        self._messages += result.observations
        if stop := stop_after(result, answer.stop, len(self._rewards), self._session.max_turns):
            raise _Over(stop)
        if (history := result.metadata.get(CHANGED_HISTORY)) is not None:
            self._messages = list(history)
        if self._used >= self._settings.max_context:
            limit = self._settings.max_context
            raise _Over(
                RolloutStop.CONTEXT, f"{self._used} tokens: no room for a turn in {limit} (rollout.max_context)"
            )

    async def _settle(self) -> None:
        """Where we end the episode and not the environment: what it is worth as it stands."""
        if self._over.stop.is_failure or not self._rewards:
            return
        try:
            reward = await self._timed(self._session.grade())
        except EnvironmentFailure as error:
            self._over = _Over(RolloutStop.ENV_FAILED, str(error))
        except _Over as late:
            self._over = late
        else:
            self._rewards[-1] += reward or 0.0
            self._is_ungraded |= reward is None

    def _transcript(self) -> dict[str, list[Message]]:
        try:
            is_short = len(msgspec.json.encode(self._messages)) <= LARGEST_TRANSCRIPT
        except (TypeError, ValueError):
            is_short = False
        return {MESSAGES: self._messages} if is_short else {}

    async def _timed(self, work: Awaitable[T]) -> T:
        try:
            return await self._watch.run(work)
        except OutOfTime as late:
            raise _Over(RolloutStop.TIMEOUT, str(late)) from None
