"""Errors for refused requests, with their status and message."""

from __future__ import annotations

from palestra.store.errors import JournalError, StoreError

LASTING = 424  # a permanent one: the SDK sends 5xx again


class Refusal(Exception):
    """Permanent unless the status says otherwise: 429 and 503 ask to come back, 400 and 404 do not."""

    def __init__(self, status: int, detail: str, *, retry_after_s: float | None = None):
        super().__init__(detail)
        self.status, self.detail, self.retry_after_s = status, detail, retry_after_s


class ApiError(Refusal):
    """Says which parameter is meant, by which code programs know it, and whether sending it again is of any use."""

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
        """To send it again would not help, whatever SDKs think of the status."""

    @property
    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"} if self.is_final else {}


def not_kept(error: StoreError | JournalError) -> Refusal:
    """What a client is told whose request could not be written. A full disk may have room again in a moment, so it is
    asked to come back; when that has gone on for `write_wait_s`, its wait ends here."""
    detail = f"the request could not be stored: {error}"
    if error.is_lasting:
        return Refusal(
            LASTING, f"{detail}; this has lasted for long: check the server's disk, then send the request again"
        )
    return Refusal(503, detail, retry_after_s=5.0)


def not_found(what: str, name: str) -> Refusal:
    """Also for what is another owner's: nobody learns what exists."""
    return Refusal(404, f"no such {what}: {name[:200]}")
