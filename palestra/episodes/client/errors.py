"""What can go wrong between a client and its server."""

from __future__ import annotations


class EpisodeClientError(Exception):
    """Any of these."""


class EpisodeApiError(EpisodeClientError):
    """The server's refusal, in its words. Asking again would not help."""

    def __init__(self, status: int, detail: str, what: str):
        super().__init__(f"{what}: {detail} (HTTP {status})")
        self.status, self.detail = status, detail

    @property
    def is_run_missing(self) -> bool:
        """Nobody has made the run yet; other 404s are of routes and episodes that will never be there."""
        return self.status == 404 and self.detail.startswith("no run ")


class NotThere(EpisodeApiError, LookupError):
    """The server knows no run or episode of that name (404)."""


class ServerSilent(EpisodeClientError, ConnectionError):
    """It could not be reached, or asked to come back later, for as long as this client was told to try."""


class NoEpisode(EpisodeClientError):
    """Nothing could be claimed within `wait_s`."""


class InvalidResult(EpisodeClientError, ValueError):
    """A result that no server would take, such as a reward that is no number."""


class ClientClosed(EpisodeClientError):
    """`close()` was called."""


class ListenError(EpisodeClientError):
    """There is nothing to listen on, or a group was passed over."""
