"""Errors of the episode client."""

from __future__ import annotations


class EpisodeClientError(Exception):
    """Base class of the episode client's errors."""


class EpisodeApiError(EpisodeClientError):
    """The server refused the request; the message is the server's. Repeating it would not help."""

    def __init__(self, status: int, detail: str, what: str):
        super().__init__(f"{what}: {detail} (HTTP {status})")
        self.status, self.detail = status, detail

    @property
    def is_run_missing(self) -> bool:
        """Whether the run does not exist yet; other 404s are about routes and episodes that will never exist."""
        return self.status == 404 and self.detail.startswith("no run ")


class NotThere(EpisodeApiError, LookupError):
    """The server has no run or episode of that name (404)."""


class ServerSilent(EpisodeClientError, ConnectionError):
    """The server could not be reached, or was busy, for the whole retry time of this client."""


class NoEpisode(EpisodeClientError):
    """Nothing could be claimed within `wait_s`."""


class InvalidResult(EpisodeClientError, ValueError):
    """The result is impossible, such as a reward that is not a number."""


class NotPlayedHere(EpisodeClientError, LookupError):
    """Raised by a player that does not have what an episode's task needs; another player gets the episode."""


class ClientClosed(EpisodeClientError):
    """`close()` was called."""


class ListenError(EpisodeClientError):
    """The listener is not open, or a group was not acknowledged."""
