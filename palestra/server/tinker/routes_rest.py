"""Tinker: training runs, checkpoints, sessions, keys. Thin: what they mean is in `rest_service`."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import FileResponse

from palestra.server.core.owners.callers import Caller
from palestra.server.core.paths import TinkerPath
from palestra.server.http.access import CallerNow, public_url
from palestra.server.http.body import read_body
from palestra.server.tinker import schemas_rest as r
from palestra.server.tinker.downloads import DownloadTicket
from palestra.server.tinker.rest_service import RestService, Scope, path_from
from palestra.server.tinker.schemas import INT64, Id
from palestra.server.tinker.service import ServiceNow
from palestra.store.records import Rights

router = APIRouter(prefix="/api/v1", tags=["rest"])

CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
MAX_PAGE = 1000  # the CLI requests as many
BINARY_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
Offset = Annotated[int, Query(ge=0, le=INT64)]


async def _rest(service: ServiceNow) -> RestService:
    return service.rest


async def _key_holder(request: Request) -> Caller:
    """Any rights are enough: a key may always ask about itself."""
    return await request.app.state.authenticator.admit(request, rights=tuple(Rights))


Rest = Annotated[RestService, Depends(_rest)]
PathNow = Annotated[TinkerPath, Depends(path_from)]
KeyHolder = Annotated[Caller, Depends(_key_holder)]
DONE = 204


# Training runs


@router.get("/training_runs", response_model_exclude_none=True)
async def training_runs(
    rest: Rest,
    caller: CallerNow,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: Id | None = None,
) -> r.TrainingRunsResponse:
    """The training runs of the caller, newest first."""
    return await rest.training_runs(caller, access_scope, project_id, limit, offset)


@router.get("/training_runs/{run_id}", response_model_exclude_none=True)
async def training_run(run_id: str, rest: Rest, caller: CallerNow, access_scope: Scope = "owned") -> r.TrainingRun:
    """One training run."""
    return await rest.training_run(caller, run_id, access_scope)


@router.get("/training_runs/{run_id}/checkpoints", response_model_exclude_none=True)
async def run_checkpoints(run_id: str, rest: Rest, caller: CallerNow) -> r.CheckpointsResponse:
    """The checkpoints of a training run."""
    return await rest.run_checkpoints(caller, run_id)


# Checkpoints


@router.get("/checkpoints", response_model_exclude_none=True)
async def checkpoints(rest: Rest, caller: CallerNow, limit: Limit = 100, offset: Offset = 0) -> r.CheckpointsResponse:
    """All checkpoints of the caller."""
    return await rest.checkpoints(caller, limit, offset)


@router.delete(CHECKPOINT, status_code=DONE)
async def delete_checkpoint(path: PathNow, rest: Rest, caller: CallerNow) -> Response:
    """Delete a checkpoint; its files are deleted a while later."""
    await rest.delete(caller, path)
    return Response(status_code=DONE)


@router.post(CHECKPOINT + "/publish", status_code=DONE)
async def publish(path: PathNow, rest: Rest, caller: CallerNow) -> Response:
    """Let every owner of this server read a checkpoint."""
    await rest.publish(caller, path, public=True)
    return Response(status_code=DONE)


@router.delete(CHECKPOINT + "/publish", status_code=DONE)
async def unpublish(path: PathNow, rest: Rest, caller: CallerNow) -> Response:
    """Make a published checkpoint private again."""
    await rest.publish(caller, path, public=False)
    return Response(status_code=DONE)


@router.put(CHECKPOINT + "/ttl", status_code=DONE)
async def set_ttl(path: PathNow, body: r.TtlRequest, rest: Rest, caller: CallerNow) -> Response:
    """Set when a checkpoint expires."""
    await rest.set_ttl(caller, path, body.ttl_seconds)
    return Response(status_code=DONE)


@router.get(CHECKPOINT + "/external_weights_urls")
async def external_weights_urls(
    path: PathNow, request: Request, rest: Rest, caller: CallerNow
) -> r.ExternalWeightsUrlsResponse:
    """Addresses at which the files of a checkpoint can be downloaded without a key."""
    return await rest.file_urls(caller, path, public_url(request))


@router.get(CHECKPOINT + "/files/{file:path}", response_class=FileResponse)
@router.head(CHECKPOINT + "/files/{file:path}", response_class=FileResponse, include_in_schema=False)
async def checkpoint_file(
    path: PathNow,
    file: str,
    rest: Rest,
    version: str = "",
    expires: Annotated[int, Query(ge=0, le=INT64)] = 0,
    signature: str = "",
) -> FileResponse:
    """A file of a checkpoint, by an address of `external_weights_urls`; no key is needed."""
    found = await rest.file(DownloadTicket(path, version, file, expires), signature)
    headers = {"cache-control": "private, no-store", "x-content-type-options": "nosniff"}
    return FileResponse(found, media_type="application/octet-stream", headers=headers)


@router.post("/copy_weights")
async def copy(
    body: r.CopyWeightsRequest,
    service: ServiceNow,
    caller: CallerNow,
    x_idempotency_key: Annotated[str | None, Header(max_length=256)] = None,
) -> r.CopyWeightsResponse:
    """Copy a checkpoint into a training run of the caller."""
    return r.CopyWeightsResponse(tinker_path=await service.copies.copy(caller, body, x_idempotency_key))


@router.put("/uploads/{upload_id}/{file}", openapi_extra=BINARY_BODY)
async def upload(
    upload_id: str,
    file: str,
    request: Request,
    service: ServiceNow,
    caller: CallerNow,
    offset: Annotated[int, Query(ge=0, le=INT64)] = 0,
) -> r.UploadResponse:
    """Upload a part of a file of an adapter, which begins at `offset`; for `import_weights`."""
    size = await service.imports.receive_part(caller, upload_id, file, offset, await read_body(request))
    return r.UploadResponse(size_bytes=size)


@router.post("/import_weights")
async def import_(body: r.ImportWeightsRequest, service: ServiceNow, caller: CallerNow) -> r.ImportWeightsResponse:
    """Make an uploaded adapter loadable for an hour; load it and save it to keep it."""
    return r.ImportWeightsResponse(tinker_path=await service.imports.import_weights(caller, body))


# Sessions


@router.get("/sessions")
async def sessions(
    rest: Rest, caller: CallerNow, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
) -> r.SessionsResponse:
    """The sessions of the caller. They are never published, so both scopes give the same."""
    return await rest.sessions(caller, limit, offset)


@router.post("/sessions/search", response_model_exclude_none=True)
async def search_sessions(body: r.SearchRequest, rest: Rest, caller: CallerNow) -> r.SearchResponse:
    """Find sessions by their fields."""
    return await rest.search(caller, body)


@router.get("/sessions/{session_id}", response_model_exclude_none=True)
async def session(session_id: str, rest: Rest, caller: CallerNow, access_scope: Scope = "owned") -> r.SessionResponse:
    """One session with what was made in it."""
    return await rest.session(caller, session_id)


@router.put("/sessions/{session_id}/project", status_code=DONE)
async def set_project(session_id: str, body: r.ProjectRequest, rest: Rest, caller: CallerNow) -> Response:
    """Assign a session to a project."""
    await rest.set_project(caller, session_id, body.project_id)
    return Response(status_code=DONE)


@router.get("/sessions/{session_id}/trace_export", response_model_exclude_none=True)
async def trace_export(session_id: str, rest: Rest, caller: CallerNow) -> r.TraceExportResponse:
    """Answers `failed`: no such traces are kept here."""
    await rest.own_session(caller, session_id)
    return r.TraceExportResponse(
        status="failed", error="this server stores no traces; /metrics has the timings of requests"
    )


# Keys, usage


@router.get("/auth/apikey/me")
async def key(rest: Rest, caller: KeyHolder) -> r.KeyResponse:
    """What the caller's key may do."""
    return rest.key(caller)


@router.delete("/auth/apikey/me", status_code=DONE)
async def revoke_key(rest: Rest, caller: KeyHolder) -> Response:
    """Revoke the caller's own key."""
    await rest.revoke(caller)
    return Response(status_code=DONE)


@router.get("/audit")
async def audit(
    caller: CallerNow,
    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all",
    day: str | None = None,
) -> r.AuditResponse:
    """Empty: no such log is kept here."""
    return r.AuditResponse(entries=[])


@router.get("/billing/usage/events")
async def usage(caller: CallerNow) -> r.UsageResponse:
    """Empty: nothing is billed here."""
    return r.UsageResponse(data=[], sessions={})


@router.get("/billing/usage/checkpoints/current")
async def storage(caller: CallerNow, project_id: Id | None = None) -> r.StorageResponse:
    """Empty: nothing is billed here."""
    return r.StorageResponse(data=[])
