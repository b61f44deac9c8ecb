"""Bodies and answers of the episode API. The server refuses unknown fields."""

from __future__ import annotations

from msgspec import Struct

from palestra.types.episodes import (
    ClaimRequest,
    EndAnswer,
    EndRequest,
    EpisodeInfo,
    HeartbeatAnswer,
    Lease,
    LeaseRef,
    NewGroup,
    PlayedGroup,
    Registered,
    RunInfo,
    RunSettings,
)
from palestra.types.readiness import make_ready
from palestra.types.timelines import EpisodeTimeline


class PutRun(Struct, frozen=True, kw_only=True):
    settings: RunSettings | None = None
    """All settings: those left out get their defaults. None: unchanged."""
    model: str | None = None


class Runs(Struct, frozen=True):
    runs: list[RunInfo]


class NewGroups(Struct, frozen=True, kw_only=True):
    groups: list[NewGroup]


class RegisteredGroups(Struct, frozen=True):
    groups: list[Registered]


class PlayedGroups(Struct, frozen=True):
    groups: list[PlayedGroup]
    cursor: int
    """Cursor to continue from, and to commit once the trainer has stored all groups."""


class Commit(Struct, frozen=True, kw_only=True):
    cursor: int


class Weights(Struct, frozen=True, kw_only=True):
    version: int
    model: str


class Empty(Struct, frozen=True):
    pass


class Claimed(Struct, frozen=True):
    leases: list[Lease]
    retry_after_s: float
    """Seconds until a claim should be repeated, if there are no leases."""
    reason: str = ""
    """Why there are no leases although episodes wait: paused, trainer_behind, engine_full or client_share, with an
    explanation."""


class HeartbeatRequest(Struct, frozen=True, kw_only=True):
    leases: list[LeaseRef]
    client_id: str = ""
    """Name of the client; not needed with an episode key."""


class HeartbeatAnswers(Struct, frozen=True):
    beats: list[HeartbeatAnswer]


class EndRequests(Struct, frozen=True, kw_only=True):
    ends: list[EndRequest]
    client_id: str = ""


class EndedEpisodes(Struct, frozen=True):
    ended: list[EndAnswer]


class Release(Struct, frozen=True, kw_only=True):
    leases: list[LeaseRef]
    client_id: str = ""
    reason: str = ""


class Cancel(Struct, frozen=True, kw_only=True):
    run: str
    episode_ids: list[str] = []
    group_ids: list[str] = []
    reason: str = ""


class Cancelled(Struct, frozen=True):
    cancelled: int


class PictureContent(Struct, frozen=True):
    """A picture that a model call of an episode showed, as the model read it."""

    digest: str
    data: bytes
    """A PNG file; base64 in JSON."""


class RunDeleted(Struct, frozen=True):
    deleted: int
    """Number of episodes that were deleted with the run."""


class Requeue(Struct, frozen=True, kw_only=True):
    episode_ids: list[str]


class Requeued(Struct, frozen=True):
    requeued: int


class EpisodePage(Struct, frozen=True):
    episodes: list[EpisodeInfo]
    total: int


make_ready(__name__)


BODIES = (
    PutRun,
    NewGroups,
    Commit,
    Weights,
    Empty,
    ClaimRequest,
    HeartbeatRequest,
    EndRequests,
    Release,
    Cancel,
    Requeue,
)
ANSWERS = (
    *(Runs, RunInfo, RegisteredGroups, PlayedGroups, Claimed, HeartbeatAnswers, EndedEpisodes),
    *(Cancelled, RunDeleted, PictureContent, Requeued, EpisodePage, EpisodeInfo, EpisodeTimeline),
)
