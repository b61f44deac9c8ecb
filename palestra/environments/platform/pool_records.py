"""The record of each instance of a pool: who requested what, its state, how long it may live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.instance import Instance

MISSED_BEATS = 2  # intervals without a heartbeat before an instance ends: a single late one is accepted


class InstanceState(StrEnum):
    PENDING = "pending"
    """Its seed is being built."""
    RUNNING = "running"
    STOPPED = "stopped"
    """Closed by its owner, or expired."""
    ERROR = "error"
    """It could not be made, or was lost."""


S = InstanceState
MOVES = {S.PENDING: {S.RUNNING, S.ERROR, S.STOPPED}, S.RUNNING: {S.STOPPED, S.ERROR}, S.STOPPED: set(), S.ERROR: set()}


class PoolLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_instances: int = 10_000
    max_per_team: int = 10_000
    max_resident_bytes: int = 1 << 30
    """Bytes that all instances in memory may take; the least recently used ones are moved to disk."""
    ttl_s: float = 600
    """Time to live from the last use, if the request names no other."""
    max_age_s: float = 24 * 3600
    """Maximum age of an instance, however often it is used; also the longest TTL that can be requested."""
    kept_s: float = 600
    """How long an instance that ended is still known."""


class InstanceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a new instance."""

    app: str
    data: str
    """`SeedDatabase.key`, such as small-17."""
    version: str
    """The app's version at the time of the request."""
    variables: Mapping[str, str] = {}
    ttl_s: float | None = None
    heartbeat_s: float | None = None
    run_id: str | None = None
    region: str | None = None


@dataclass(slots=True)
class InstanceRecord:
    id: str
    team: str
    wanted: InstanceSpec
    created_at: float
    updated_at: float
    ttl_s: float
    request_id: str | None = None
    state: InstanceState = InstanceState.PENDING
    reason: str = ""
    """Why it ended."""
    ended_at: float | None = None
    instance: Instance | None = None
    """None if it is on disk, or over."""
    users: int = 0
    """Number of calls that run: it stays in memory meanwhile."""
    holders: int = 0
    """Number of connections: it does not end for lack of use meanwhile."""
    size_bytes: int = 0
    writes: int = -1
    """What the connection had written when the size was last computed."""
    slot: int = -1
    """Its slot in the timer wheel."""

    @property
    def is_over(self) -> bool:
        return self.state in (S.STOPPED, S.ERROR)

    def move(self, state: InstanceState, now: float, reason: str = "") -> None:
        if state not in MOVES[self.state]:
            raise PlatformError(f"instance {self.id} is {self.state} and cannot become {state}")
        self.state, self.updated_at, self.reason = state, now, reason
        if self.is_over:
            self.ended_at = now

    def deadline(self, limits: PoolLimits) -> float:
        """Returns when it ends, or when one that ended is forgotten."""
        if self.ended_at is not None:
            return self.ended_at + limits.kept_s
        beat = self.wanted.heartbeat_s
        idle = self.ttl_s if beat is None else min(self.ttl_s, MISSED_BEATS * beat)
        return min(self.updated_at + idle, self.created_at + limits.max_age_s)


class PoolUsage(msgspec.Struct, frozen=True):
    instances: int
    """Number of instances that are not over."""
    resident: int
    resident_bytes: int
    spilled: int
    known: int
    """Including those that ended a short while ago."""


class LimitReached(PlatformError):
    def __init__(self, count: int, limit: int, whose: str) -> None:
        super().__init__(f"{whose} {count} running instances of at most {limit}: close some, or wait for them to end")
        self.count, self.limit = count, limit


class DuplicateRequest(PlatformError):
    """The same request id again: while its instance is being made, or for something else."""

    def __init__(self, record: InstanceRecord, *, is_same: bool) -> None:
        reason = "is in progress" if is_same else "was used for another request"
        super().__init__(f"request {record.request_id} {reason}")
        self.instance_id = record.id if is_same else None


class InstanceGone(PlatformError):
    """There is no such instance (any more), or it belongs to another team."""

    def __init__(self) -> None:
        super().__init__("no such instance: make another")


class DiskFull(PlatformError):
    """An instance could not be stored, and has ended."""

    def __init__(self, record: InstanceRecord) -> None:
        super().__init__(f"{record.reason}; close instances, or make room where the platform keeps its state")


class InstanceOver(PlatformError):
    """The text is short: Fleet's SDK parses a refusal as the answer it had asked for, and pydantic's error, which it
    then raises, shows at most 36 characters of ours."""

    def __init__(self, record: InstanceRecord) -> None:
        super().__init__(f"{record.state}: {record.reason or 'not ready yet'}")
        self.record = record
