"""Errors for refused requests, with their status and message.

The SDK retries 408, 409, 429 and 5xx, some of them for ever: a permanent error has another status. 429 passes by
waiting, 402 is for the tokens of a day (the request keeps its number), 403 is for good.
"""

from __future__ import annotations

from palestra.store.errors import JournalError, StoreError

LASTING = 424  # a permanent status: the SDK repeats requests after 5xx


class Refusal(Exception):
    """A request is refused. Permanent unless the status says otherwise: 429 and 503 ask to retry, 400 and 404 do
    not."""

    def __init__(self, status: int, detail: str, *, retry_after_s: float | None = None):
        super().__init__(detail)
        self.status, self.detail, self.retry_after_s = status, detail, retry_after_s


class ApiError(Refusal):
    """A refusal that names the parameter, a code for programs, and whether repeating the request can help."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        is_final: bool = False,
    ):
        super().__init__(status, detail, retry_after_s=retry_after_s)
        self.param, self.code = param, code
        self.is_final = is_final
        """Whether repeating the request would not help, whatever SDKs conclude from the status."""

    @property
    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"} if self.is_final else {}


def not_kept(error: StoreError | JournalError) -> Refusal:
    """Returns the refusal for a request that could not be written. A full disk may have room again in a moment, so the
    client is asked to retry; after `write_wait_s` the refusal is permanent."""
    detail = f"the request could not be stored: {error}"
    if error.is_lasting:
        return Refusal(
            LASTING, f"{detail}; this has lasted for long: check the server's disk, then send the request again"
        )
    return Refusal(503, detail, retry_after_s=5.0)


def not_found(what: str, name: str) -> Refusal:
    """Returns a 404, also for what belongs to another owner, so that callers do not learn what exists."""
    return Refusal(404, f"no such {what}: {name[:200]}")
