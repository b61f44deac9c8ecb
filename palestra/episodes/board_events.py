"""Events that the board reports to its broker."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct, field

from palestra.types.episodes import ClaimBlocker, EpisodeInfo, EpisodeKind, EpisodeState, LeaseRef, SamplingBounds


class RunProgress(Struct, frozen=True, gc=False):
    """A run's newest group numbers, and who is to get them."""

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
    """Why it came to nothing; None: it ended."""
    state: EpisodeState
    """The episode's, by now."""


@dataclass(frozen=True, slots=True)
class AdmittedCall:
    """A model call that may be answered."""

    run: str
    model: str | None
    """The run's; None where it has none yet."""
    version: int
    bounds: SamplingBounds


@dataclass(frozen=True, slots=True)
class RunHold:
    """Why nothing is claimed of a run."""

    code: ClaimBlocker
    words: str

    def __str__(self) -> str:
        return f"{self.code}: {self.words}"


@dataclass(frozen=True, slots=True)
class EpisodeQueueState:
    """The queue of one kind of episode in one run, for whoever watches."""

    owner: str
    run: str
    kind: EpisodeKind
    queued: int
    oldest_at: float | None
    """When the one that waits longest was registered."""
    leased: int


@dataclass(frozen=True, slots=True)
class EpisodeListing:
    episodes: list[EpisodeInfo]
    total: int


class BoardEvents(Struct):
    """Since the last time it was taken."""

    claimable: set[str] = field(default_factory=set)
    """Owners for whom something was queued, or became due, or was resumed: those who wait for a claim try again."""
    delivered: set[tuple[str, str]] = field(default_factory=set)
    """Owners' runs with another group to read."""
    deleted: set[tuple[str, str]] = field(default_factory=set)
    """Owners' runs: who waits for their groups waits in vain."""
    over: list[OpenLease] = field(default_factory=list)
    """Leases that ended, in whatever way: their keys are void."""
