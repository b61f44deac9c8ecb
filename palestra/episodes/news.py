"""What the board tells its broker besides the records of the wire."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct, field

from palestra.types.episodes import EpisodeInfo, EpisodeKind, EpisodeState, Held, LeaseRef, SamplingBounds


class Progress(Struct, frozen=True, gc=False):
    """Of a run: the newest numbers of its groups, and who is to get them."""

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
    """Of an attempt that is over."""

    over_at: float | None
    loss: str | None
    """Why it came to nothing; None: it ended."""
    state: EpisodeState
    """The episode's, by now."""


@dataclass(frozen=True, slots=True)
class Call:
    """A model call that may be answered."""

    run: str
    model: str | None
    """The run's; None where it has none yet."""
    version: int
    bounds: SamplingBounds


@dataclass(frozen=True, slots=True)
class Hold:
    """Why nothing is claimed of a run."""

    code: Held
    words: str

    def __str__(self) -> str:
        return f"{self.code}: {self.words}"


@dataclass(frozen=True, slots=True)
class QueueState:
    """Of one kind in one run, for whoever watches."""

    owner: str
    run: str
    kind: EpisodeKind
    queued: int
    oldest_at: float | None
    """When the one that waits longest was registered."""
    leased: int


@dataclass(frozen=True, slots=True)
class Listing:
    episodes: list[EpisodeInfo]
    total: int


class News(Struct):
    """Since the last time it was taken."""

    claimable: set[str] = field(default_factory=set)
    """Owners for whom something was queued, or became due, or was resumed: those who wait for a claim try again."""
    delivered: set[tuple[str, str]] = field(default_factory=set)
    """Owners' runs with another group to read."""
    deleted: set[tuple[str, str]] = field(default_factory=set)
    """Owners' runs: who waits for their groups waits in vain."""
    over: list[OpenLease] = field(default_factory=list)
    """Leases that ended, in whatever way: their keys are void."""
