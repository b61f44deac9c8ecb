"""Events that the board reports to its broker."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct, field

from palestra.types.episodes import ClaimBlocker, EpisodeInfo, EpisodeKind, EpisodeState, LeaseRef, SamplingBounds


class RunProgress(Struct, frozen=True, gc=False):
    """A run's newest group numbers, and the address they are pushed to."""

    delivered: int
    committed: int
    push_to: str


class OpenLease(Struct, frozen=True):
    owner: str
    run: str
    client_id: str
    ref: LeaseRef
    claimed_at: float


class AttemptOutcome(Struct, frozen=True):
    """How an attempt that is over ended."""

    over_at: float | None
    loss: str | None
    """Why it was lost; None: it ended with a result."""
    state: EpisodeState
    """The present state of the episode."""


@dataclass(frozen=True, slots=True)
class AdmittedCall:
    """A model call that may be answered."""

    run: str
    model: str | None
    """The run's model; None if it has none yet."""
    version: int
    bounds: SamplingBounds


@dataclass(frozen=True, slots=True)
class RunHold:
    """Why nothing can be claimed from a run."""

    code: ClaimBlocker
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


@dataclass(frozen=True, slots=True)
class EpisodeQueueState:
    """The queue of one kind of episode in one run, for metrics."""

    owner: str
    run: str
    kind: EpisodeKind
    queued: int
    oldest_at: float | None
    """Time of registration of the episode that has waited longest."""
    leased: int


@dataclass(frozen=True, slots=True)
class EpisodeListing:
    episodes: list[EpisodeInfo]
    total: int


class BoardEvents(Struct):
    """Events since the last call of `take_news`."""

    claimable: set[str] = field(default_factory=set)
    """Owners for whom something was queued, became due or was resumed: waiting claims try again."""
    delivered: set[tuple[str, str]] = field(default_factory=set)
    """Owner and name of runs with another group to read."""
    deleted: set[tuple[str, str]] = field(default_factory=set)
    """Owner and name of deleted runs: waiting for their groups ends."""
    over: list[OpenLease] = field(default_factory=list)
    """Leases that ended in any way: their keys are void."""
