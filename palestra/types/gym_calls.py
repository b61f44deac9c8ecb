"""Counts of a gym server's calls by path, of failures by class.

Shared by the servers, which count, and by who watches them.
"""

from __future__ import annotations

from msgspec import Struct

STATS = "/call_stats"
"""Not `/stats`, which may be a path of the server's own."""
RUN = "/run"
"""The path of an agent at which one call is one rollout."""


class PathCalls(Struct, frozen=True, kw_only=True):
    path: str
    calls: int = 0
    """Calls that have ended."""
    failed: int = 0
    """Calls that were answered with an error."""
    running: int = 0
    per_s: float = 0.0
    """Calls each second that ended within the last minute."""
    failed_per_s: float = 0.0
    mean_s: float | None = None
    """Mean time of a call."""


class ServerCalls(Struct, frozen=True, kw_only=True):
    since: float
    """When the process began to count, in seconds since the epoch."""
    paths: list[PathCalls] = []
    failures: dict[str, int] = {}
    """Calls that failed, by failure class, or by HTTP status where there is none."""
