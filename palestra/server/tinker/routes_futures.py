"""Tinker: waiting for results. A poll is held until there is one, or for `poll_hold_s`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from palestra.server.http.access import CallerNow
from palestra.server.tinker import schemas as s
from palestra.server.tinker.encode import json_bytes
from palestra.server.tinker.service import ServiceNow
from palestra.util.json_types import JsonObject

router = APIRouter(prefix="/api/v1", tags=["futures"])

PROTOBUF = "application/x-protobuf"
_ANSWERS: dict[int | str, JsonObject] = {408: {"model": s.TryAgainResponse, "description": "Not ready yet; ask again."}}


@router.post("/retrieve_future", responses=_ANSWERS, response_class=Response)
async def retrieve_future(
    body: s.RetrieveFutureRequest, request: Request, service: ServiceNow, caller: CallerNow
) -> Response:
    """The result of a call, or `try_again` after a while."""
    wants_protobuf = PROTOBUF in request.headers.get("accept", "")
    answer = await service.results.retrieve(caller, body.request_id, as_protobuf=wants_protobuf)
    if isinstance(answer, s.TryAgainResponse):
        return JSONResponse(answer.model_dump(exclude_none=True), status_code=408)
    if isinstance(answer, bytes):
        return Response(answer, media_type=PROTOBUF)
    return Response(json_bytes(answer), media_type="application/json")


@router.post("/retrieve_futures", response_model_exclude_none=True)
async def retrieve_futures(
    body: s.RetrieveFuturesRequest, service: ServiceNow, caller: CallerNow
) -> s.RetrieveFuturesResponse:
    """The states of several calls at once."""
    return await service.sampling.retrieve_many(caller, body)


@router.post("/cancel_future", status_code=204)
async def cancel_future(body: s.CancelFutureRequest, service: ServiceNow, caller: CallerNow) -> Response:
    """Cancel a sampling call of the caller; unknown ones are no error."""
    service.sampling.cancel(caller, body.request_id)
    return Response(status_code=204)
