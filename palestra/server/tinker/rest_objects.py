"""Converts rows of the store to the objects that REST calls return."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Literal

from palestra.server.core.paths import TinkerPath
from palestra.server.tinker import schemas_rest as r
from palestra.server.tinker.schemas import FinishReason
from palestra.store import records
from palestra.util.json_types import JsonMapping

REST_TYPES: dict[records.CheckpointKind, Literal["training", "sampler", "external"]] = {
    records.CheckpointKind.WEIGHTS: "training",
    records.CheckpointKind.SAMPLER: "sampler",
    records.CheckpointKind.EXTERNAL: "external",
}


def time_of(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def strings(metadata: JsonMapping | None) -> dict[str, str] | None:
    """Converts values to text, because the SDK accepts nothing else."""
    if metadata is None:
        return None
    return {str(k): v if isinstance(v, str) else json.dumps(v, default=str) for k, v in metadata.items()}


def path_of(row: records.CheckpointRow) -> TinkerPath:
    return TinkerPath(row.model_id, row.kind, row.name)


def checkpoint_of(row: records.CheckpointRow) -> r.CheckpointObject:
    path = path_of(row)
    return r.CheckpointObject(
        checkpoint_id=path.checkpoint_id,
        checkpoint_type=REST_TYPES[path.kind],
        time=time_of(row.created_at),
        tinker_path=str(path),
        size_bytes=row.size_bytes,
        public=row.public,
        user_metadata=strings(row.user_metadata),
        expires_at=None if row.expires_at is None else time_of(row.expires_at),
    )


def run_of(
    row: records.ModelRow,
    last_request_at: float,
    last: records.CheckpointRow | None,
    last_sampler: records.CheckpointRow | None,
) -> r.TrainingRun:
    return r.TrainingRun(
        training_run_id=row.model_id,
        base_model=row.base_model,
        model_owner=row.owner,
        corrupted=row.corrupted,
        lora_rank=row.lora.rank,
        last_request_time=time_of(last_request_at),
        last_checkpoint=checkpoint_of(last) if last else None,
        last_sampler_checkpoint=checkpoint_of(last_sampler) if last_sampler else None,
        user_metadata=strings(row.user_metadata),
    )


def status_of(session: records.SessionRow) -> r.SessionStatusObject:
    match session.status:
        case records.SessionStatus.ACTIVE:
            return r.SessionStatusObject(type="active")
        case records.SessionStatus.EXPIRED:
            return r.SessionStatusObject(
                type="cancelled", detail="the session expired: no heartbeat arrived for too long"
            )
        case records.SessionStatus.FINISHED:
            reason = FinishReason(type=session.finish_reason or "success")  # type: ignore[arg-type]
            return r.SessionStatusObject(type="client_finished", reason=reason, detail=session.finish_detail)


def summary_of(found: records.SessionSummary) -> r.SessionSummaryObject:
    session = found.session
    return r.SessionSummaryObject(
        session_id=session.session_id,
        created_at=time_of(session.created_at),
        owner=session.owner,
        project_id=session.project_id or "",
        status=status_of(session),
        checkpoints_count=found.checkpoints_count,
        display_name=session.display_name,
        user_metadata=strings(session.user_metadata),
        checkpoint_storage_bytes=found.checkpoint_storage_bytes,
    )
