"""Rows as typed records, which the query modules take and return. Times are seconds since the epoch, UTC."""

from __future__ import annotations

from enum import StrEnum
from typing import Generic, TypeVar

from msgspec import Struct

from palestra.types import LoraConfig
from palestra.types.readiness import make_ready
from palestra.util.json_types import JsonObject

T = TypeVar("T")


class SessionStatus(StrEnum):
    ACTIVE = "active"
    FINISHED = "finished"
    """The client has said that the session is finished."""
    EXPIRED = "expired"
    """The session had no heartbeat for too long."""


class SessionRow(Struct, frozen=True, kw_only=True):
    session_id: str
    owner: str
    created_at: float
    last_heartbeat_at: float
    status: SessionStatus = SessionStatus.ACTIVE
    tags: list[str] = []
    user_metadata: JsonObject = {}
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    finish_reason: str | None = None
    finish_detail: str | None = None


class StatusFilter(Struct, frozen=True, kw_only=True):
    status: SessionStatus
    finish_reasons: list[str] | None = None
    """Reasons of finished sessions to search for; None: any."""


class SearchCursor(Struct, frozen=True, kw_only=True):
    """Points at the last session of the previous page."""

    created_at: float
    session_id: str


class SessionSearch(Struct, frozen=True, kw_only=True):
    """Conditions that must all hold, except that of `session_id` and `display_name` one is enough."""

    session_id: str | None = None
    display_name: str | None = None
    """Each word must occur somewhere in the name; upper and lower case are the same."""
    owners: list[str] | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    statuses: list[StatusFilter] | None = None
    limit: int = 50
    cursor: SearchCursor | None = None


class SessionSummary(Struct, frozen=True, kw_only=True):
    session: SessionRow
    checkpoints_count: int
    checkpoint_storage_bytes: int


class SessionPage(Struct, frozen=True, kw_only=True):
    """One page of sessions, newest first."""

    sessions: list[SessionSummary]
    next_cursor: SearchCursor | None


class ModelStatus(StrEnum):
    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    UNLOADED = "unloaded"


LOADED = (ModelStatus.PENDING, ModelStatus.READY)


class ModelRow(Struct, frozen=True, kw_only=True):
    model_id: str
    session_id: str
    owner: str
    base_model: str
    lora: LoraConfig
    created_at: float
    last_request_at: float
    user_metadata: JsonObject | None = None
    status: ModelStatus = ModelStatus.PENDING
    error: str | None = None
    snapshot_seq: int = -1
    """Requests up to this number are settled: every snapshot on disk covers them."""
    corrupted: bool = False
    usage_seq: int = -1
    """Requests up to this number are in the usage of its owner."""


class SamplerStatus(StrEnum):
    LIVE = "live"
    GONE = "gone"


class SamplerRow(Struct, frozen=True, kw_only=True):
    """Samples from a base model, a saved checkpoint (`model_path`, `folder`), or the state of a model after request
    `seq_id`."""

    sampler_id: str
    session_id: str
    owner: str
    base_model: str
    created_at: float
    model_path: str | None = None
    model_id: str | None = None
    seq_id: int | None = None
    folder: str | None = None
    status: SamplerStatus = SamplerStatus.LIVE


class SnapshotCopy(Struct, frozen=True, kw_only=True):
    """The copy of a file of a worker in object storage."""

    item: str
    """Id of the model whose snapshot it is, or of the sampler whose weights they are."""
    base_model: str
    file: str
    """Name in the worker's state folder."""
    seq_id: int
    """Last request that the snapshot covers; -1 for a sampler."""
    object: str
    """Name in the storage."""
    digest: str
    """SHA-256."""
    size_bytes: int


class CheckpointKind(StrEnum):
    """The kind of a checkpoint, which is the middle part of a tinker:// path."""

    WEIGHTS = "weights"
    SAMPLER = "sampler_weights"
    EXTERNAL = "external_weights"


class CheckpointStatus(StrEnum):
    PENDING = "pending"
    COMPLETED = "completed"
    FAILED = "failed"


class CheckpointKey(Struct, frozen=True):
    model_id: str
    kind: CheckpointKind
    name: str

    @property
    def path(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


class CheckpointRow(Struct, frozen=True, kw_only=True):
    """What a path refers to. While it is being replaced it still refers to its old `folder`; see `PendingSave`."""

    model_id: str
    kind: CheckpointKind
    name: str
    owner: str
    status: CheckpointStatus
    folder: str
    base_model: str
    lora: LoraConfig
    request_id: str
    seq_id: int
    """Number of the model's request that saved it."""
    created_at: float
    size_bytes: int = 0
    error: str | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    completed_at: float | None = None
    expires_at: float | None = None

    @property
    def key(self) -> CheckpointKey:
        return CheckpointKey(self.model_id, self.kind, self.name)


class PendingSave(Struct, frozen=True, kw_only=True):
    """A checkpoint that is being written. Several may be under way for one name; the latest request wins."""

    request_id: str
    model_id: str
    kind: CheckpointKind
    name: str
    seq_id: int
    folder: str
    created_at: float
    ttl_s: float | None = None
    """Time to live, counted from completion; None: kept until deleted."""
    user_metadata: dict[str, str] | None = None

    @property
    def key(self) -> CheckpointKey:
        return CheckpointKey(self.model_id, self.kind, self.name)


class SaveCompletion(Struct, frozen=True, kw_only=True):
    checkpoint: CheckpointRow
    obsolete_folder: str | None
    """Folder that no path refers to any more; live samplers may still use it."""


class Rights(StrEnum):
    ADMIN = "admin"
    TRAINER = "trainer"
    WORKER = "worker"
    EPISODE = "episode"
    METRICS = "metrics"
    REPLICA = "replica"
    """For samplers elsewhere: they see the adapters and samples of all owners."""


class Key(Struct, frozen=True, kw_only=True):
    key_hash: str
    key_id: int
    name: str
    owner: str
    rights: Rights
    created_at: float
    revoked_at: float | None = None
    last_used_at: float | None = None
    """Within 15 seconds."""
    expires_at: float | None = None
    """Time at which the key ends by itself; None: never."""
    old_hash: str | None = None
    """Hash of the text that it had before it was rotated the last time."""
    old_until: float | None = None
    """Time until which the old text is good, too."""

    def is_valid(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class NewKey(Struct, frozen=True, kw_only=True):
    text: str
    """The key itself, which is shown once; only its hash is stored."""
    key: Key


ALL_OWNERS = "*"
"""Owner of the limits that hold for owners without their own."""


class Quota(Struct, frozen=True, kw_only=True):
    """The limits of an owner. None: the limit for all owners, or none."""

    owner: str
    models: int | None = None
    """Models in training at the same time."""
    pending_samples: int | None = None
    """Samples that wait or run."""
    pending_bytes: int | None = None
    """Bytes of training requests that wait or run."""
    tokens_per_day: int | None = None
    """Tokens of prompts, sampled and trained ones together, for each day by UTC."""
    checkpoint_bytes: int | None = None
    """Bytes of the checkpoints that are kept."""
    picture_bytes: int | None = None
    """Bytes of the pictures of conversations that are kept; the least recently used ones beyond it are deleted."""


LIMITS = tuple(name for name in Quota.__struct_fields__ if name != "owner")


class UsageCounts(Struct, kw_only=True):
    """What was used."""

    prompts: int = 0
    """Requests to sample."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    """Tokens that went through a training pass, also forward only."""
    checkpoint_bytes: int = 0
    """Bytes of checkpoints that were written."""
    engine_s: float = 0.0
    """Seconds that engines computed; of a batch its share."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.sampled_tokens + self.trained_tokens

    def add(self, other: UsageCounts) -> None:
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


COUNTS = UsageCounts.__struct_fields__


class UsageKey(Struct, frozen=True):
    """What usage is counted by."""

    day: str
    """Day by UTC, such as 2026-11-17."""
    owner: str
    run: str
    """The model that was trained or sampled; empty for a base model."""


class Alias(Struct, frozen=True, kw_only=True):
    """A name that an owner has given to a base model, a checkpoint's path or a sampling session."""

    owner: str
    name: str
    model: str
    """What the alias points at."""
    created_at: float
    updated_at: float
    """Time when it was last moved."""
    version: int = 1
    """How many times it was set, including the first time."""


class Page(Struct, Generic[T], frozen=True, kw_only=True):
    items: list[T]
    total: int


make_ready(__name__)
