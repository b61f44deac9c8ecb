"""Plays one episode by a user's function."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, SupportsFloat

from palestra.episodes.client.async_episode import AsyncEpisode, EpisodeView, OnError
from palestra.episodes.client.client import Episode
from palestra.episodes.client.errors import InvalidResult, NotPlayedHere
from palestra.episodes.client.loop_thread import outcome
from palestra.episodes.client.results import as_result
from palestra.types.episodes import EpisodeResult

log = logging.getLogger(__name__)

Result = EpisodeResult | SupportsFloat | None
"""What a player returns: a reward, a full result, or None if it has ended the episode itself."""
Player = Callable[[Episode], Result]
AsyncPlayer = Callable[[AsyncEpisode], Awaitable[Result]]


async def play_one(episode: AsyncEpisode, player: AsyncPlayer, on_error: OnError) -> None:
    """Plays an episode to its end. Raises NotPlayedHere, and then leaves the episode to the caller."""
    try:
        result = await player(episode)
        if (final := _final_result(episode, result)) is not None:
            await episode.end_with(final)
        await episode.leave()
    except NotPlayedHere:
        raise
    except (asyncio.CancelledError, GeneratorExit) as error:
        await episode.leave(error, on_error)
        raise
    except BaseException as error:  # boundary: otherwise it would end the loop, and with it the other players
        _log_failure(episode, error)
        await episode.leave(error, on_error)


def is_async(player: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(player) or inspect.iscoroutinefunction(type(player).__call__)


def in_threads(player: Player) -> AsyncPlayer:
    """Plays each episode in a thread of its own, which keeps neither the program nor the pool from ending."""

    async def play(episode: AsyncEpisode) -> Result:
        played: Future[Result] = Future()
        name = f"play-{episode.id}"
        threading.Thread(target=_run, args=(played, player, Episode(episode)), name=name, daemon=True).start()
        return await outcome(played)

    return play


def _run(played: Future[Result], player: Player, episode: Episode) -> None:
    try:
        played.set_result(player(episode))
    except BaseException as error:
        played.set_exception(error)


def _final_result(episode: EpisodeView, result: Result) -> EpisodeResult | None:
    """Returns the result to send. None: the player has ended or released the episode, or forgot to end it."""
    if episode.is_over:
        return None
    if result is None:
        log.warning("episode %s is given back, because its player returned None without episode.end(…)", episode.id)
        return None
    return as_result(result)


def _log_failure(episode: EpisodeView, error: BaseException) -> None:
    if not episode.can_continue and not isinstance(error, InvalidResult):
        log.info("episode %s was lost, then its player raised %r", episode.id, error)
    else:
        log.warning("episode %s: its player raised", episode.id, exc_info=error)
