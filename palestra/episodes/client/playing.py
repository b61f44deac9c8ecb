"""`play`: a user's function plays the episodes of a server."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from palestra.episodes.client.async_client import AsyncEpisodeClient
from palestra.episodes.client.async_episode import OnError
from palestra.episodes.client.client import EpisodeClient
from palestra.episodes.client.loop_thread import LoopThread
from palestra.episodes.client.players import AsyncPlayer, Player, in_threads, is_async
from palestra.episodes.client.pool import PlayCounts, PlayerPool, PoolOptions


def play(
    client: EpisodeClient,
    player: Player | AsyncPlayer,
    *,
    on_error: OnError | str = OnError.END,
    handle_signals: bool = True,
    **options: Any,
) -> PlayCounts:
    """Plays the server's episodes, `concurrency` at a time, until it is stopped; other options are those of
    PoolOptions.

    `player(episode)` returns a reward or an EpisodeResult; if it is async, it gets an AsyncEpisode on the pool's event
    loop. A player that raises does not end the pool. SIGINT and SIGTERM drain the pool: it claims no more and finishes
    its episodes; after `drain_s` or a second signal they are given back.
    """
    chosen = cast(AsyncPlayer, player) if is_async(player) else in_threads(cast(Player, player))
    pool = PlayerPool(client.inner, chosen, OnError(on_error), PoolOptions(**options))
    thread = LoopThread("episode-players")
    loop = thread.loop
    try:
        with _signals(lambda name: loop.call_soon_threadsafe(pool.stop, name), handle_signals):
            return thread.wait(pool.run())
    finally:
        thread.close()


async def play_async(
    client: AsyncEpisodeClient, player: AsyncPlayer, *, on_error: OnError | str = OnError.END, **options: Any
) -> PlayCounts:
    """Plays like `play`, on the caller's event loop. Cancelling it drains the pool; signals are left to the caller."""
    pool = PlayerPool(client, player, OnError(on_error), PoolOptions(**options))
    work = asyncio.create_task(pool.run())
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        pool.stop("cancelled")
        await asyncio.gather(work, return_exceptions=True)
        raise


@contextmanager
def _signals(stop: Callable[[str], object], enabled: bool) -> Iterator[None]:
    """Handles signals; only the main thread of a program receives them."""
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda got, _: stop(signal.Signals(got).name)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
