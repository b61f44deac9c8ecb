"""JSON bodies of the REST part of the Tinker API: training runs, checkpoints, sessions, samplers, keys and usage."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, model_validator

from palestra.server.tinker.schemas import INT64, FinishReason, Finite, Id, Metadata, Name, Seq, Text, Ttl, WireModel
from palestra.util.json_types import JsonObject


class PageCursor(WireModel):
    offset: int
    limit: int
    total_count: int


class CheckpointObject(WireModel):
    checkpoint_id: str
    """`weights/name`, which is put into URLs as it is."""
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


class CheckpointsResponse(WireModel):
    checkpoints: list[CheckpointObject]
    cursor: PageCursor | None = None


class TrainingRun(WireModel):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: CheckpointObject | None = None
    last_sampler_checkpoint: CheckpointObject | None = None
    user_metadata: dict[str, str] | None = None


class TrainingRunsResponse(WireModel):
    training_runs: list[TrainingRun]
    cursor: PageCursor


class TtlRequest(WireModel):
    ttl_seconds: Ttl | None
    """None: it never expires."""


class ExternalWeightsUrlsResponse(WireModel):
    urls: dict[str, str]
    expires: datetime


class CopyWeightsRequest(WireModel):
    """Copies into a project, or into a numbered place of a session."""

    source_path: Text
    session_id: Id | None = None
    model_seq_id: Seq | None = None
    destination_project_id: Id | None = None
    ttl_seconds: Ttl | None = None
    weights_access_token: Text | None = None

    @model_validator(mode="after")
    def _one_destination(self) -> CopyWeightsRequest:
        given = [x is not None for x in (self.destination_project_id, self.session_id, self.model_seq_id)]
        if given not in ([True, False, False], [False, True, True]):
            raise ValueError("send destination_project_id, or session_id and model_seq_id")
        return self


class CopyWeightsResponse(WireModel):
    tinker_path: str


class UploadResponse(WireModel):
    size_bytes: int
    """Size of the file so far."""


class ImportedLora(WireModel):
    """The shape of an adapter, as its config says it; the engine compares it with the files."""

    rank: Annotated[int, Field(ge=1, le=INT64)]
    alpha: Annotated[Finite, Field(gt=0)]
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    per_expert: bool = False


class ImportWeightsRequest(WireModel):
    upload_id: Id
    base_model: Text
    lora: ImportedLora


class ImportWeightsResponse(WireModel):
    tinker_path: str


class SamplerResponse(WireModel):
    sampler_id: str
    base_model: str
    model_path: str | None = None


class SessionsResponse(WireModel):
    sessions: list[str]


class SessionResponse(WireModel):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class ProjectRequest(WireModel):
    project_id: Id


class TraceExportResponse(WireModel):
    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


# Search


class SearchOwner(WireModel):
    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[list[Name], Field(min_length=1, max_length=10)] | None = None


class StatusQuery(WireModel):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[list[Literal["success", "errored", "interrupted"]], Field(min_length=1)] | None = None


class SearchCursorObject(WireModel):
    last_created_at: Annotated[AwareDatetime, Field(strict=False)]
    last_session_id: Id


class SearchRequest(WireModel):
    session_id: Id | None = None
    project_ids: Annotated[list[Id], Field(max_length=1000)] | None = None
    user_metadata: Metadata | None = None
    display_name: Name | None = None
    owner: SearchOwner = SearchOwner()
    statuses: Annotated[list[StatusQuery], Field(min_length=1, max_length=16)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursorObject | None = None


class SessionStatusObject(WireModel):
    type: Literal["active", "cancelled", "client_finished"]
    reason: FinishReason | None = None
    """The reason of `client_finished`."""
    detail: str | None = None


class SessionSummaryObject(WireModel):
    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatusObject | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SearchResponse(WireModel):
    sessions: list[SessionSummaryObject]
    next_cursor: SearchCursorObject | None = None


# Keys, usage and events. Nothing is billed here, so usage is empty.


class OrgDetails(WireModel):
    name: str


class UserDetails(WireModel):
    email: str


class KeyDetails(WireModel):
    org_details: OrgDetails
    user_details: UserDetails


class KeyResponse(WireModel):
    key_id: int
    name: str
    note: str
    details: KeyDetails


class AuditResponse(WireModel):
    entries: list[JsonObject]


class UsageResponse(WireModel):
    data: list[JsonObject]
    sessions: JsonObject


class StorageResponse(WireModel):
    data: list[JsonObject]
