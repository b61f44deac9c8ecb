"""Plays episodes of a training run with verifiers, whose calls have the key of the episode's attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments.errors import EnvironmentFailure
from palestra.environments.verifiers.host_process import VerifiersHost
from palestra.environments.verifiers.settings import settings_of
from palestra.episodes import AsyncEpisode, EpisodeError, EpisodeResult
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.verifiers.outcomes import VerifiersOutcome, attempt_of, request_of
from palestra.types.episodes import GROUP_SIZE, ResultKey
from palestra.types.rollouts import RolloutStop, is_verifiers
from palestra.util.json_types import JsonObject


class VerifiersPlayer:
    """Plays the episodes of one entry of the config."""

    def __init__(self, host: VerifiersHost, players: int) -> None:
        """`players`: how many episodes are played here at a time."""
        self._host, self._players = host, players
        self._groups: dict[str, GatheredGroup] = {}

    async def __call__(self, episode: AsyncEpisode, settings: RolloutSettings) -> EpisodeResult:
        try:
            async with asyncio.timeout(settings.timeout_s):
                await self._host.start()
                outcome = await (self._play_grouped if self._host.is_grouped else self._play)(episode, settings)
        except TimeoutError:
            message = f"it took longer than {settings.timeout_s:g} s (rollout.timeout_s)"
            return EpisodeResult(error=EpisodeError(type=RolloutStop.TIMEOUT, message=message))
        except EnvironmentFailure as error:
            return EpisodeResult(error=EpisodeError(type=RolloutStop.ENV_FAILED, message=str(error)[:2000]))
        return result_of(outcome)

    async def _play(self, episode: AsyncEpisode, settings: RolloutSettings) -> VerifiersOutcome:
        (outcome,) = await play_together(self._host, [episode], settings)
        return outcome

    async def _play_grouped(self, episode: AsyncEpisode, settings: RolloutSettings) -> VerifiersOutcome:
        """Waits until all episodes of the group are here. The one that comes last plays them."""
        size = int(episode.tags.get(GROUP_SIZE, 1))
        if size > self._players:
            raise EnvironmentFailure(
                f"its rewards are given to {size} rollouts together, and {self._players} are played here at a time; "
                f"set episodes.players={size} or more"
            )
        group = self._groups.setdefault(episode.group_id, GatheredGroup(size))
        place = group.add(episode)
        try:
            if len(group.episodes) == group.size:
                group.begin(play_together(self._host, group.episodes, settings))
            return (await asyncio.shield(group.outcomes))[place]
        finally:
            group.leave()
            if not group.waiting:
                self._groups.pop(episode.group_id, None)


class GatheredGroup:
    """Episodes of a group, of which all are needed before any is graded."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.episodes: list[AsyncEpisode] = []
        self.waiting = 0
        self.outcomes: asyncio.Future[list[VerifiersOutcome]] = asyncio.get_running_loop().create_future()
        self._playing: asyncio.Task[None] | None = None

    def add(self, episode: AsyncEpisode) -> int:
        """Returns the episode's place."""
        self.episodes.append(episode)
        self.waiting += 1
        return len(self.episodes) - 1

    def begin(self, playing: Coroutine[Any, Any, list[VerifiersOutcome]]) -> None:
        async def play() -> None:
            try:
                self.outcomes.set_result(await playing)
            except Exception as error:  # boundary: those who wait get it
                self.outcomes.set_exception(error)

        self._playing = asyncio.create_task(play(), name="a group of verifiers")

    def leave(self) -> None:
        self.waiting -= 1
        if not self.waiting and self._playing is not None:
            self._playing.cancel()


async def play_together(
    host: VerifiersHost, episodes: list[AsyncEpisode], settings: RolloutSettings
) -> list[VerifiersOutcome]:
    first = episodes[0]
    request = request_of(first.task, settings, first.base_url, first.model)
    attempts = [attempt_of(one.api_key, one.seed) for one in episodes]
    return msgspec.convert(await host.call("play", **request, attempts=attempts), list[VerifiersOutcome])


def result_of(outcome: VerifiersOutcome) -> EpisodeResult:
    metadata: JsonObject = {ResultKey.STOP: outcome.ending, ResultKey.VERDICT: outcome.verdict}
    if outcome.agents is not None:
        metadata[ResultKey.TRAINED_AGENTS] = list(outcome.agents)
    if (problem := outcome.problem) is not None:
        error = EpisodeError(type=problem.type, message=problem.message[:2000])
        return EpisodeResult(error=error, metrics=outcome.numbers, metadata=metadata)
    is_several = outcome.reward is None and outcome.agents is not None
    return EpisodeResult(
        reward=outcome.reward,
        agent_rewards=outcome.agents if is_several and outcome.agents else {},
        metrics=outcome.numbers,
        metadata=metadata,
    )


@asynccontextmanager
async def open_verifiers_hosts(
    entries: Iterable[EnvironmentEntry], logs: Path
) -> AsyncIterator[dict[str, VerifiersHost]]:
    """Opens the processes of entries, by the entry's name; each starts when it is needed first."""
    async with AsyncExitStack() as stack:
        hosts: dict[str, VerifiersHost] = {}
        for place, entry in enumerate(entries):
            if is_verifiers(entry.name):
                host = VerifiersHost(entry.name, settings_of(entry), logs / f"verifiers-{place}.log")
                hosts[entry.name] = await stack.enter_async_context(host)
        yield hosts


@asynccontextmanager
async def open_verifiers_players(
    entries: Iterable[EnvironmentEntry], logs: Path, players: int
) -> AsyncIterator[dict[str, VerifiersPlayer]]:
    """`players`: how many episodes are played here at a time."""
    async with open_verifiers_hosts(entries, logs) as hosts:
        yield {name: VerifiersPlayer(host, players) for name, host in hosts.items()}
