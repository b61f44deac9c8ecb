"""A request that is refused, and how the client is told."""

from __future__ import annotations


class Refusal(Exception):
    """Permanent unless the status says otherwise: 429 and 503 ask to come back, 400 and 404 do not."""

    def __init__(self, status: int, detail: str, *, retry_after_s: float | None = None):
        super().__init__(detail)
        self.status, self.detail, self.retry_after_s = status, detail, retry_after_s


def not_found(what: str, name: str) -> Refusal:
    """Also for what is another owner's: nobody learns what exists."""
    return Refusal(404, f"no such {what}: {name[:200]}")
