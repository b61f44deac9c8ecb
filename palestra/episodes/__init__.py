"""Episodes: played anywhere, delivered exactly once. `board` is the state machine of the server, `client` the library
of players and trainers; neither imports the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palestra.episodes.client import (
        AsyncEpisode,
        AsyncEpisodeClient,
        AsyncRun,
        ClientClosed,
        Episode,
        EpisodeApiError,
        EpisodeClient,
        EpisodeClientError,
        EpisodeError,
        EpisodeResult,
        InvalidResult,
        NewGroup,
        NoEpisode,
        OnError,
        PlayCounts,
        PoolOptions,
        Run,
        RunSettings,
        ServerSilent,
        Task,
        TinkerScriptClient,
        play,
        play_async,
    )

__all__ = [
    "AsyncEpisode",
    "AsyncEpisodeClient",
    "AsyncRun",
    "ClientClosed",
    "Episode",
    "EpisodeApiError",
    "EpisodeClient",
    "EpisodeClientError",
    "EpisodeError",
    "EpisodeResult",
    "InvalidResult",
    "NewGroup",
    "NoEpisode",
    "OnError",
    "PlayCounts",
    "PoolOptions",
    "Run",
    "RunSettings",
    "ServerSilent",
    "Task",
    "TinkerScriptClient",
    "play",
    "play_async",
]


def __getattr__(name: str) -> Any:
    """The client library when it is asked for: the server has no use for it."""
    if name in __all__:
        from palestra.episodes import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
