"""How one episode is played by a user's function, and what came of it.

Owns: threads or tasks for players, outcomes. Never touches: how many are played, and until when.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import wait
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, SupportsFloat

from palestra.episodes.client.async_client import AsyncEpisodeClient
from palestra.episodes.client.async_episode import AsyncEpisode
from palestra.episodes.client.client import EpisodeClient, as_result
from palestra.episodes.client.episode import GOODBYE_S, Episode, EpisodeView, OnError
from palestra.episodes.client.errors import EpisodeClientError, InvalidResult
from palestra.types.episodes import EpisodeResult, LeaseRef

log = logging.getLogger(__name__)

Result = EpisodeResult | SupportsFloat | None
"""A reward, or all there is to say; None where the player has ended the episode itself."""
Player = Callable[[Episode], Result]
AsyncPlayer = Callable[[AsyncEpisode], Awaitable[Result]]

STOPPED = "the pool was stopped"


class Outcome(StrEnum):
    ENDED = "ended"
    FAILED = "failed"
    RELEASED = "released"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Played:
    ref: LeaseRef
    outcome: Outcome
    reward: float | None

    @classmethod
    def of(cls, episode: EpisodeView) -> Played:
        if episode.ended is not None and episode.ended.is_kept and episode.result is not None:
            outcome = Outcome.ENDED if episode.result.error is None else Outcome.FAILED
            return cls(episode.held.ref, outcome, episode.result.reward)
        return cls(episode.held.ref, Outcome.LOST if not episode.held.can_continue else Outcome.RELEASED, None)


Tell = Callable[[Played], None]


class Players(Protocol):
    def start(self, episode: Episode, tell: Tell) -> None: ...

    def stop(self, episodes: list[Episode]) -> None:
        """They are given back, whatever their players do."""
        ...

    def close(self) -> None: ...


class ThreadPlayers:
    """A thread each, which does not keep the program from ending."""

    def __init__(self, client: EpisodeClient, player: Player, on_error: OnError):
        self._client, self._player, self._on_error = client, player, on_error

    def start(self, episode: Episode, tell: Tell) -> None:
        thread = threading.Thread(target=self._play, args=(episode, tell), name=f"play-{episode.id}", daemon=True)
        thread.start()

    def _play(self, episode: Episode, tell: Tell) -> None:
        try:
            result = self._player(episode)
            if (final := _final_result(episode, result)) is not None:
                episode.end_with(final)
            episode.leave()
        except BaseException as error:
            _log_failure(episode, error)
            episode.leave(error, self._on_error)
        finally:
            tell(Played.of(episode))

    def stop(self, episodes: list[Episode]) -> None:
        try:
            self._client.release_many(episodes, STOPPED, retry_s=GOODBYE_S)
        except EpisodeClientError as error:
            log.warning("%d episodes were not given back: %s", len(episodes), error)

    def close(self) -> None:
        pass


class AsyncPlayers:
    """A task each."""

    def __init__(
        self, client: AsyncEpisodeClient, player: AsyncPlayer, on_error: OnError, loop: asyncio.AbstractEventLoop
    ):
        self._client, self._player, self._on_error, self._loop = client, player, on_error, loop
        self._tasks: dict[LeaseRef, asyncio.Task[None]] = {}
        """Touched by the loop's thread only."""

    def start(self, episode: Episode, tell: Tell) -> None:
        self._loop.call_soon_threadsafe(self._begin, AsyncEpisode(episode.held, self._client), tell)

    def _begin(self, episode: AsyncEpisode, tell: Tell) -> None:
        ref = episode.held.ref
        self._tasks[ref] = task = self._loop.create_task(self._play(episode, tell), name=f"play-{episode.id}")
        task.add_done_callback(lambda _: self._tasks.pop(ref, None))

    async def _play(self, episode: AsyncEpisode, tell: Tell) -> None:
        try:
            result = await self._player(episode)
            if (final := _final_result(episode, result)) is not None:
                await episode.end_with(final)
            await episode.leave()
        except BaseException as error:
            _log_failure(episode, error)
            await episode.leave(error, self._on_error)
            if isinstance(error, asyncio.CancelledError | GeneratorExit):
                raise  # anything else would end the loop, and with it the other players
        finally:
            tell(Played.of(episode))

    def stop(self, episodes: list[Episode]) -> None:
        async def cancel() -> None:
            tasks = [task for episode in episodes if (task := self._tasks.get(episode.held.ref))]
            for task in tasks:
                task.cancel(STOPPED)
            if tasks:
                await asyncio.wait(tasks, timeout=GOODBYE_S)

        wait([asyncio.run_coroutine_threadsafe(cancel(), self._loop)], 2 * GOODBYE_S)

    def close(self) -> None:
        pass


class OwnLoopPlayers(AsyncPlayers):
    """On an event loop in a thread of its own, for callers without one."""

    def __init__(self, client: EpisodeClient, player: AsyncPlayer, on_error: OnError):
        super().__init__(AsyncEpisodeClient.beside(client), player, on_error, asyncio.new_event_loop())
        self._thread = threading.Thread(target=self._loop.run_forever, name="episode-players", daemon=True)
        self._thread.start()

    def close(self) -> None:
        async def end() -> None:
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            await self._loop.shutdown_asyncgens()

        ended = asyncio.run_coroutine_threadsafe(end(), self._loop)
        wait([ended], GOODBYE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GOODBYE_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._client.let_go()


def _final_result(episode: EpisodeView, result: Result) -> EpisodeResult | None:
    """None: the player has ended it or given it back, or forgot to."""
    if episode.is_over:
        return None
    if result is None:
        log.warning("episode %s: its player returned None without episode.end(…): it is given back", episode.id)
        return None
    return as_result(result)


def _log_failure(episode: EpisodeView, error: BaseException) -> None:
    if not episode.can_continue and not isinstance(error, InvalidResult):
        log.info("episode %s was lost, then its player raised %r", episode.id, error)
    else:
        log.warning("episode %s: its player raised", episode.id, exc_info=error)
