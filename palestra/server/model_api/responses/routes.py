"""The Responses API over HTTP. Thin: what the calls mean is in `calls`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from palestra.server.core.errors import ApiError
from palestra.server.core.wire_errors import shown
from palestra.server.http.access import ModelCallerNow
from palestra.server.http.body import decoded, read_body
from palestra.server.http.openapi import JSON_BODY, OR_EVENTS, refusals
from palestra.server.model_api.chat.routes import ServiceNow
from palestra.server.model_api.errors import OpenAIErrorEnvelope, OpenAIRoute
from palestra.server.model_api.responses.calls import ResponsesCall
from palestra.server.model_api.sse import sse

router = APIRouter(route_class=OpenAIRoute, responses=refusals(OpenAIErrorEnvelope), tags=["model endpoint"])


@router.post("/responses", openapi_extra=JSON_BODY, responses=OR_EVENTS)
async def responses(request: Request, service: ServiceNow, caller: ModelCallerNow) -> Response:
    """OpenAI's Responses, plain or streaming."""
    body = await read_body(request)
    call = await decoded(ResponsesCall.read, body)
    if call.header.call.stream:
        return await sse(request, call.stream(service.chats, caller))
    return await service.retries.answer(
        request, caller, body, call.header.response_id, lambda: call.answer(service.chats, caller)
    )


@router.post("/responses/input_tokens", openapi_extra=JSON_BODY)
async def input_tokens(request: Request, service: ServiceNow, caller: ModelCallerNow) -> Response:
    """Count the tokens that a Responses request would read."""
    call = await decoded(ResponsesCall.read, await read_body(request))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": await call.count(service.chats, caller)})


@router.api_route("/responses/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
async def nothing_kept(rest: str, caller: ModelCallerNow) -> Response:
    detail = (
        f"there is nothing at /responses/{shown(rest)[1:-1]}: responses are not stored by id; "
        "their conversations are in /v1/traces/{trace_id}, and each response names its trace_id"
    )
    raise ApiError(404, detail, param="response_id", code="not_found")
