"""Playing episodes of a server from anywhere: needs nothing but the core install.

Begin at `async_client`; `client` is the same for threads.
"""

from palestra.episodes.client.async_client import AsyncEpisodeClient
from palestra.episodes.client.async_episode import AsyncEpisode, OnError
from palestra.episodes.client.async_listener import AsyncListener, AsyncPushed
from palestra.episodes.client.async_run import AsyncRun
from palestra.episodes.client.client import Episode, EpisodeClient, Listener, Pushed, Run
from palestra.episodes.client.errors import (
    ClientClosed,
    EpisodeApiError,
    EpisodeClientError,
    InvalidResult,
    ListenError,
    NoEpisode,
    NotPlayedHere,
    NotThere,
    ServerSilent,
)
from palestra.episodes.client.playing import play, play_async
from palestra.episodes.client.pool import PlayCounts, PoolOptions
from palestra.episodes.client.tinkerscript import TinkerScriptClient
from palestra.types.episodes import EpisodeError, EpisodeResult, NewGroup, RunSettings, SamplingBounds
from palestra.types.rollouts import Task

__all__ = [
    "AsyncEpisode",
    "AsyncEpisodeClient",
    "AsyncListener",
    "AsyncPushed",
    "AsyncRun",
    "ClientClosed",
    "Episode",
    "EpisodeApiError",
    "EpisodeClient",
    "EpisodeClientError",
    "EpisodeError",
    "EpisodeResult",
    "InvalidResult",
    "ListenError",
    "Listener",
    "NewGroup",
    "NoEpisode",
    "NotPlayedHere",
    "NotThere",
    "OnError",
    "PlayCounts",
    "PoolOptions",
    "Pushed",
    "Run",
    "RunSettings",
    "SamplingBounds",
    "ServerSilent",
    "Task",
    "TinkerScriptClient",
    "play",
    "play_async",
]
