"""`play`: a function of the user's plays what a server has.

Owns: threads or an event loop for it, signals. Never touches: the order of things; the pool has it.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from palestra.episodes.client.async_client import AsyncEpisodeClient
from palestra.episodes.client.client import EpisodeClient
from palestra.episodes.client.episode import OnError
from palestra.episodes.client.players import (
    AsyncPlayer,
    AsyncPlayers,
    OwnLoopPlayers,
    Player,
    Players,
    ThreadPlayers,
)
from palestra.episodes.client.pool import PlayCounts, Pool, PoolOptions


def play(
    client: EpisodeClient,
    player: Player | AsyncPlayer,
    *,
    on_error: OnError | str = OnError.END,
    handle_signals: bool = True,
    **options: Any,
) -> PlayCounts:
    """Plays what the server has, `concurrency` at a time, until it is stopped; other options are PoolOptions'.

    `player(episode)` returns a reward or an EpisodeResult; if it is async, it gets an AsyncEpisode on an event loop of
    the pool's own. One that raises does not end the pool. SIGINT and SIGTERM drain it: nothing new is claimed, what is
    played is finished, after `drain_s` or a second signal it is given back.
    """
    chosen, wanted = PoolOptions(**options), OnError(on_error)
    if _is_async(player):
        players: Players = OwnLoopPlayers(client, cast(AsyncPlayer, player), wanted)
    else:
        players = ThreadPlayers(client, cast(Player, player), wanted)
    pool = Pool(client, players, chosen)
    try:
        with _signals_stop(pool, handle_signals):
            return pool.run()
    finally:
        players.close()


async def play_async(
    client: AsyncEpisodeClient, player: AsyncPlayer, *, on_error: OnError | str = OnError.END, **options: Any
) -> PlayCounts:
    """The same on the caller's event loop. Cancelled, it drains; signals are the caller's."""
    players = AsyncPlayers(client, player, OnError(on_error), asyncio.get_running_loop())
    pool = Pool(client.sync, players, PoolOptions(**options))
    work = asyncio.ensure_future(asyncio.to_thread(pool.run))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        pool.stop("cancelled")
        await asyncio.gather(work, return_exceptions=True)
        raise


def _is_async(player: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(player) or inspect.iscoroutinefunction(type(player).__call__)


@contextmanager
def _signals_stop(pool: Pool, wanted: bool) -> Iterator[None]:
    """Only the main thread of a program gets signals."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda got, _: pool.stop(signal.Signals(got).name)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
