"""Errors of the board that refuse a whole call. The failure of one item of several is a record, not an exception."""

from __future__ import annotations


class BoardError(Exception):
    """A call was refused. `status` is the corresponding HTTP status, `code` one word for programs; the message says
    what to do."""

    def __init__(self, status: int, detail: str, *, code: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.code = code
        """One of lease_lost, cancelled, stale_weights, deadline, unknown, paused, or empty."""
        self.retry_after_s = retry_after_s
        """Seconds after which to try again, for 429 and 503."""
