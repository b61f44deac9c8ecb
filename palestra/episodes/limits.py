"""Limits for one client or run."""

from __future__ import annotations

from dataclasses import dataclass

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    min_lease_s: float = 1.0
    max_lease_s: float = 3600.0
    max_open_leases: int = 4096
    """Leases that one client may hold."""
    max_claim: int = 256
    """Leases in one claim."""
    max_runs: int = 10_000
    """Runs that one owner may have."""
    max_members: int = 4096
    """Episodes that a group may begin with."""
    max_task_bytes: int = 1 << 20
    max_result_bytes: int = 1 << 20
    max_backoff_s: float = 600.0
    max_losses: int = 16
    """Losses of any kind before an episode is parked; the same number is stored with it."""
    remember_s: float = 7 * DAY_S
    """How long a repeated end of a committed episode is recognised."""
    max_remembered: int = 200_000
    """Number of committed episodes that are remembered, about 350 bytes each in memory."""
    max_claims_remembered: int = 16_384
    """Number of remembered claims whose leases are all over; if repeated, they are refused, not served again."""
