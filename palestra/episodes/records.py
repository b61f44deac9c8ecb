"""Runs, groups and episodes as the board holds them: mutable and linked; here they are converted to rows and infos.
Objects that are made with each call are a `Struct`, which is made several times as fast as a dataclass.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import msgspec

from palestra.episodes.board_events import EpisodeQueueState, RunHold
from palestra.episodes.queue import RunQueue
from palestra.types.episode_rows import EpisodeRow, GroupRow, RunRow
from palestra.types.episodes import (
    AttemptLoss,
    ClaimBlocker,
    EpisodeInfo,
    EpisodeKind,
    EpisodeResult,
    EpisodeState,
    GroupState,
    LeaseRef,
    NewGroup,
    RunInfo,
    RunSettings,
)

ANY_NUMBER = 1 << 31
ROUNDING = 1e-9  # 0.29 of 100 is 28.999999999999996


@dataclass(slots=True, eq=False)
class BoardRun:
    owner: str
    name: str
    tag: str
    """Beginning of its episodes' ids."""
    settings: RunSettings
    model: str | None
    created_at: float
    version: int = 0
    is_paused: bool = False
    committed: int = 0
    delivered: int = 0
    registered: int = 0
    groups: dict[str, BoardGroup] = field(default_factory=dict)
    """Groups in the order of registration."""
    log: dict[int, BoardGroup] = field(default_factory=dict)
    """Groups that are complete or dropped and not committed, by number."""
    leased: dict[str, BoardEpisode] = field(default_factory=dict)
    holders: dict[str, int] = field(default_factory=dict)
    """Number of leases by client."""
    counts: dict[EpisodeState, int] = field(default_factory=lambda: dict.fromkeys(EpisodeState, 0))
    queued: dict[EpisodeKind, int] = field(default_factory=lambda: dict.fromkeys(EpisodeKind, 0))
    queue: RunQueue[BoardEpisode] = field(default_factory=RunQueue)
    is_staging: bool = False
    """Whether a registration is under way in parts."""
    staged: deque[StagedGroup] = field(default_factory=deque)
    """Its groups that are saved, or soon will be, and are not visible yet."""
    engine: str = ""
    """The engine that its last model call went to. Kept in memory only."""
    published: dict[str, int] = field(default_factory=dict)
    """Versions of the models that were published last, of which calls under way may have tokens. Kept in memory only:
    no call outlives the server."""

    @property
    def is_open(self) -> bool:
        """Whether something may be claimed, if something is queued."""
        return not self.is_paused and len(self.log) < self.settings.max_ready

    @property
    def hold(self) -> RunHold | None:
        """The reason why the run is not open."""
        if self.is_open:
            return None
        if self.is_paused:
            return RunHold(ClaimBlocker.PAUSED, f"run {self.name!r} is paused")
        message = f"{len(self.log)} groups of run {self.name!r} are not committed, and its max_ready is"
        return RunHold(ClaimBlocker.TRAINER_BEHIND, f"{message} {self.settings.max_ready}")

    def room_of(self, client_id: str) -> int:
        """Returns how many more leases the client may hold."""
        if self.settings.client_share >= 1:
            return ANY_NUMBER
        open_ones = self.counts[EpisodeState.QUEUED] + self.counts[EpisodeState.LEASED]
        return max(1, int(self.settings.client_share * open_ones + ROUNDING)) - self.holders.get(client_id, 0)

    def info(self) -> RunInfo:
        return RunInfo(
            run=self.name,
            settings=self.settings,
            model=self.model,
            version=self.version,
            is_paused=self.is_paused,
            committed=self.committed,
            delivered=self.delivered,
            queued=self.counts[EpisodeState.QUEUED],
            leased=self.counts[EpisodeState.LEASED],
            ended=self.counts[EpisodeState.ENDED],
            parked=self.counts[EpisodeState.PARKED],
            held=str(self.hold or ""),
        )

    def queue_state(self, kind: EpisodeKind) -> EpisodeQueueState:
        leased = sum(episode.kind is kind for episode in self.leased.values())
        return EpisodeQueueState(self.owner, self.name, kind, self.queued[kind], self._queued_since(kind), leased)

    def _queued_since(self, kind: EpisodeKind) -> float | None:
        """Returns since when the oldest episode has been queued. Members are not older than their group, so looking at
        the first groups is enough: 100,000 episodes may be queued."""
        oldest = math.inf
        for group in self.groups.values() if self.queued[kind] else ():
            if oldest <= group.created_at:
                break
            if group.playing and group.spec.kind is kind:
                since = (one.created_at for one in group.members if one.state is EpisodeState.QUEUED)
                oldest = min((oldest, *since))
        return None if oldest == math.inf else oldest

    def row(self) -> RunRow:
        return RunRow(
            owner=self.owner,
            run=self.name,
            settings=self.settings,
            model=self.model,
            version=self.version,
            is_paused=self.is_paused,
            committed=self.committed,
            delivered=self.delivered,
            registered=self.registered,
            created_at=self.created_at,
            is_staging=self.is_staging,
        )


class BoardGroup(msgspec.Struct, eq=False):
    run: BoardRun
    spec: NewGroup
    text: str
    """The spec as JSON with sorted keys."""
    serial: int
    created_at: float
    state: GroupState = GroupState.OPEN
    reason: str = ""
    number: int | None = None
    made: int = 0
    members: list[BoardEpisode] = msgspec.field(default_factory=list)
    playing: int = 0
    """Number of members that are queued or leased."""
    ended: int = 0

    @property
    def deadline(self) -> float | None:
        return None if self.spec.deadline_s is None else self.created_at + self.spec.deadline_s

    @property
    def first_count(self) -> int:
        return self.spec.size if self.spec.count is None else self.spec.count

    @property
    def min_size(self) -> int:
        return min(2, self.spec.size) if self.spec.min_size is None else self.spec.min_size

    @property
    def max_attempts(self) -> int:
        return self.run.settings.max_attempts if self.spec.max_attempts is None else self.spec.max_attempts

    def row(self) -> GroupRow:
        return GroupRow(
            owner=self.run.owner,
            run=self.run.name,
            group_id=self.spec.group_id,
            spec=self.text,
            state=self.state,
            reason=self.reason,
            number=self.number,
            serial=self.serial,
            made=self.made,
            created_at=self.created_at,
        )


class StagedGroup(msgspec.Struct, eq=False):
    """A complete group that is not yet part of its run and the board."""

    group: BoardGroup
    episodes: list[BoardEpisode]


class BoardEpisode(msgspec.Struct, eq=False):
    episode_id: str
    run: BoardRun
    group: BoardGroup
    index: int
    seed: int
    created_at: float
    state: EpisodeState = EpisodeState.QUEUED
    attempt: int = 0
    strikes: int = 0
    lost: int = 0
    not_before: float = 0.0
    client_id: str = ""
    claim_id: str = ""
    claimed_at: float | None = None
    lease_s: float = 0.0
    ended_at: float | None = None
    version: int = 0
    oldest_version: int | None = None
    calls: int = 0
    sampled: int = 0
    """Number of sampled tokens in this attempt."""
    losses: list[AttemptLoss] = msgspec.field(default_factory=list)
    result: str | None = None
    # Kept in memory only
    is_ready: bool = False
    """Whether it is in the queue: neither in back-off nor elsewhere."""
    expires_at: float = 0.0
    """When the lease expires, if it ages."""
    left_s: float = 0.0
    """Remaining time of the lease while its run is paused."""
    open_calls: int = 0
    """Model calls that run: the lease does not age meanwhile."""
    armed_at: float | None = None
    """When the timer will look at the lease."""

    @property
    def kind(self) -> EpisodeKind:
        return self.group.spec.kind

    @property
    def ref(self) -> LeaseRef:
        return LeaseRef(episode_id=self.episode_id, attempt=self.attempt)

    @property
    def does_age(self) -> bool:
        return not self.open_calls and not self.run.is_paused

    def info(self) -> EpisodeInfo:
        is_leased = self.state is EpisodeState.LEASED
        return EpisodeInfo(
            episode_id=self.episode_id,
            run=self.run.name,
            group_id=self.group.spec.group_id,
            index=self.index,
            kind=self.kind,
            state=self.state,
            attempt=self.attempt,
            seed=self.seed,
            priority=self.group.spec.priority,
            created_at=self.created_at,
            not_before=self.not_before,
            client_id=self.client_id,
            claimed_at=self.claimed_at,
            expires_at=self.expires_at if is_leased and self.does_age else None,
            lease_s=self.lease_s,
            ended_at=self.ended_at,
            deadline=self.group.deadline,
            version=self.version,
            oldest_version=self.oldest_version,
            calls=self.calls,
            sampled_tokens=self.sampled,
            losses=list(self.losses),
            result=None if self.result is None else msgspec.json.decode(self.result, type=EpisodeResult),
            tags=self.group.spec.tags,
        )

    def row(self) -> EpisodeRow:
        return EpisodeRow(
            episode_id=self.episode_id,
            owner=self.run.owner,
            run=self.run.name,
            group_id=self.group.spec.group_id,
            index=self.index,
            seed=self.seed,
            state=self.state,
            attempt=self.attempt,
            strikes=self.strikes,
            lost=self.lost,
            created_at=self.created_at,
            not_before=self.not_before,
            client_id=self.client_id,
            claim_id=self.claim_id,
            claimed_at=self.claimed_at,
            lease_s=self.lease_s,
            ended_at=self.ended_at,
            version=self.version,
            oldest_version=self.oldest_version,
            calls=self.calls,
            sampled=self.sampled,
            losses=list(self.losses),
            result=self.result,
        )


def queued_since(one: BoardEpisode | EpisodeInfo, attempt: int, claimed_at: float) -> float:
    """Returns when this attempt could first be claimed: when the episode was made, or the back-off after the previous
    attempt was over, or it was requeued by hand."""
    if not one.losses and not one.not_before:
        return min(one.created_at, claimed_at)
    known = [one.created_at, one.not_before, *(loss.at for loss in one.losses if loss.attempt < attempt)]
    # In a lost episode, `not_before` belongs to the next attempt.
    return max((at for at in known if at <= claimed_at), default=claimed_at)
