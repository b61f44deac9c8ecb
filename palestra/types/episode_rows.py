"""Rows of the episode board on disk, and changes of them. The store writes them, the board reads them back."""

from __future__ import annotations

from operator import attrgetter

from msgspec import Struct, field

from palestra.types.episodes import AttemptLoss, EpisodeState, GroupState, RunSettings
from palestra.types.readiness import make_ready

Key = str | tuple[str, ...]
"""A row's primary key: its first field, or several. Looked up thousands of times a second."""


class RunRow(Struct, frozen=True, kw_only=True, gc=False):
    owner: str
    run: str
    settings: RunSettings
    model: str | None
    version: int
    is_paused: bool
    committed: int
    delivered: int
    """Number of the newest delivered group at the last save; a stored group may have a higher number."""
    registered: int
    """Number of groups ever registered, which is the next serial number; as of the last save."""
    created_at: float
    is_staging: bool = False
    """Whether groups with higher numbers are not registered yet, and perhaps never will be."""

    key = property(attrgetter("owner", "run"))


class GroupRow(Struct, frozen=True, kw_only=True, gc=False):
    owner: str
    run: str
    group_id: str
    spec: str
    """The `NewGroup` as JSON, keys sorted."""
    state: GroupState
    reason: str
    number: int | None
    """Number of its delivery."""
    serial: int
    """Serial number in its run, in the order of registration."""
    made: int
    """Number of members ever made, which is the index of the next one."""
    created_at: float

    key = property(attrgetter("owner", "run", "group_id"))


class EpisodeRow(Struct, frozen=True, kw_only=True, gc=False):
    episode_id: str
    owner: str
    run: str
    group_id: str
    index: int
    seed: int
    state: EpisodeState
    attempt: int
    strikes: int
    """Losses that count towards parking, since it was registered or requeued."""
    lost: int
    """All losses since it was registered or requeued."""
    created_at: float
    not_before: float
    client_id: str
    claim_id: str
    claimed_at: float | None
    lease_s: float
    ended_at: float | None
    version: int
    oldest_version: int | None
    calls: int
    sampled: int
    losses: list[AttemptLoss]
    result: str | None
    """The `EpisodeResult` as JSON, keys sorted."""

    key = property(attrgetter("episode_id"))


class Tombstone(Struct, frozen=True, kw_only=True, gc=False):
    """A trace of a committed episode or group, by which repeated requests are recognised; or of an attempt whose run
    was deleted."""

    name: str
    """An episode's id, or the hash of a run's tag and a group's id."""
    owner: str
    attempt: int
    """The attempt that ended; for a group, its negated serial number."""
    digest: bytes
    """A hash of its result, or of how it was registered; empty where there is no result."""
    until: float

    key = property(attrgetter("name"))


make_ready(__name__)  # what follows is never decoded

Row = RunRow | GroupRow | EpisodeRow | Tombstone


class Gone(Struct, frozen=True, gc=False):
    kind: type[Row]
    key: Key


Change = Row | Gone
"""A row in its current form, or the note that it was deleted."""


class SavedRows(Struct, kw_only=True):
    """All saved rows, in any order."""

    runs: list[RunRow] = field(default_factory=list)
    groups: list[GroupRow] = field(default_factory=list)
    episodes: list[EpisodeRow] = field(default_factory=list)
    tombstones: list[Tombstone] = field(default_factory=list)
