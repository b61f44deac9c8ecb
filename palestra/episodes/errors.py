"""Errors of the board for a whole call. A failure of one item of several is a record, not an exception."""

from __future__ import annotations


class BoardError(Exception):
    """`status` is the HTTP status that says the same; `code` one word for programs; the message says what to do."""

    def __init__(self, status: int, detail: str, *, code: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.code = code
        """lease_lost, cancelled, stale_weights, deadline, unknown, paused, or empty."""
        self.retry_after_s = retry_after_s
        """For 429 and 503."""
