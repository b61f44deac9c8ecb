"""The client of the episode API for threads.

Owns: nothing; `async_client` does the work. Never touches: HTTP, leases.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import SupportsFloat

from palestra.episodes.client.async_client import AsyncEpisodeClient
from palestra.episodes.client.async_episode import AsyncEpisode, OnError
from palestra.episodes.client.episode import Episode
from palestra.episodes.client.facade import Facade, iterates, waits, waits_for
from palestra.episodes.client.loop_thread import SHARED
from palestra.episodes.client.results import as_result
from palestra.episodes.client.retries import RETRY_S
from palestra.episodes.client.run import Run
from palestra.types.episodes import EndAnswer, EpisodeKind, EpisodeResult


def _for_threads(found: list[AsyncEpisode]) -> list[Episode]:
    return [Episode(one) for one in found]


class EpisodeClient(Facade[AsyncEpisodeClient]):
    """Client of a server's episodes, for any number of threads of one process. `key`: API key (None: TINKER_API_KEY).
    `retry_s`: how long to retry while the server does not answer."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        client_id: str | None = None,
        retry_s: float = RETRY_S,
        tls: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ):
        super().__init__(AsyncEpisodeClient(url, key, client_id=client_id, retry_s=retry_s, tls=tls, proxy=proxy))

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def client_id(self) -> str:
        return self.inner.client_id

    do = waits(AsyncEpisodeClient.do)

    # Playing

    @contextmanager
    def episode(
        self,
        run: str | None = None,
        kind: EpisodeKind | str | None = None,
        *,
        wait_s: float | None = None,
        lease_s: float | None = None,
        on_error: OnError | str = OnError.END,
    ) -> Iterator[Episode]:
        """Claims one episode to play, waiting at most `wait_s`. If the block raises, the episode ends as failed or is
        released, by `on_error`; if it is left without `end`, or by Ctrl-C, the episode is released."""
        on_error = OnError(on_error)
        episode = self.claim_one(run, kind, wait_s=wait_s, lease_s=lease_s)
        try:
            yield episode
        except BaseException as error:
            episode.leave(error, on_error)
            raise
        else:
            episode.leave()

    claim_one = waits_for(Episode, AsyncEpisodeClient.claim_one)
    claim = waits_for(_for_threads, AsyncEpisodeClient.claim)

    def end_many(self, ends: Iterable[tuple[Episode, EpisodeResult | SupportsFloat]]) -> list[EndAnswer]:
        """Ends many episodes in few requests; a refused result is returned in its place, not raised."""
        results = [(episode.inner, as_result(result)) for episode, result in ends]
        return SHARED.wait(self.inner.end_many(results))

    # Training and looking on

    run = waits_for(Run, AsyncEpisodeClient.run)
    runs = waits(AsyncEpisodeClient.runs)
    run_info = waits(AsyncEpisodeClient.run_info)
    delete_run = waits(AsyncEpisodeClient.delete_run)
    episodes = waits(AsyncEpisodeClient.episodes)
    episode_info = waits(AsyncEpisodeClient.episode_info)
    timeline = waits(AsyncEpisodeClient.timeline)
    export = iterates(AsyncEpisodeClient.export)
    requeue = waits(AsyncEpisodeClient.requeue)
    cancel = waits(AsyncEpisodeClient.cancel)

    # Closing

    close = waits(AsyncEpisodeClient.close)

    def __enter__(self) -> EpisodeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
