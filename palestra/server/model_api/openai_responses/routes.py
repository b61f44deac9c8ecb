"""The Responses API over HTTP. Thin: what the calls mean is in `calls`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from palestra.server.core.errors import ApiError
from palestra.server.core.owners.callers import Caller
from palestra.server.core.wire_errors import shown
from palestra.server.http.access import ModelCallerNow
from palestra.server.http.body import decoded, read_body
from palestra.server.http.openapi import JSON_BODY, OR_EVENTS, refusals
from palestra.server.model_api.answering import answered
from palestra.server.model_api.client_headers import ClientHeaders
from palestra.server.model_api.errors import OpenAIErrorEnvelope, OpenAIRoute, envelope, parse_body
from palestra.server.model_api.openai_chat.routes import ServiceNow
from palestra.server.model_api.openai_responses.calls import ResponsesCall
from palestra.server.model_api.openai_responses.schemas import ResponsesRequest
from palestra.server.model_api.openai_responses.stored import StoredResponses
from palestra.server.model_api.openai_responses.stream import failed_event
from palestra.server.model_api.service import ModelApi
from palestra.server.model_api.sse import KeepAlive

router = APIRouter(route_class=OpenAIRoute, responses=refusals(OpenAIErrorEnvelope), tags=["model endpoint"])


@router.post("/responses", openapi_extra=JSON_BODY, responses=OR_EVENTS)
async def responses(request: Request, service: ServiceNow, caller: ModelCallerNow) -> Response:
    """OpenAI's Responses, plain or streaming."""
    body = await read_body(request)
    call = await _call(request, service, caller, body)
    return await answered(
        request,
        body,
        call.origin,
        service.retries,
        plain=call.answer,
        stream=call.stream() if call.header.call.stream else None,
        keep_alive=KeepAlive(lambda error: failed_event(call.header, error)),
    )


@router.post("/responses/input_tokens", openapi_extra=JSON_BODY)
async def input_tokens(request: Request, service: ServiceNow, caller: ModelCallerNow) -> Response:
    """Count the tokens that a Responses request would read."""
    call = await _call(request, service, caller, await read_body(request))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": await call.count()})


@router.get("/responses", include_in_schema=False)
async def no_websockets() -> Response:
    """Clients that prefer WebSockets, as Codex does, take this status to mean that they should send requests."""
    return JSONResponse(envelope(426, "responses are sent over HTTP: POST to this path"), 426)


@router.get("/responses/{response_id}")
async def get_response(response_id: str, service: ServiceNow, caller: ModelCallerNow) -> Response:
    """A stored response, as it was sent."""
    body = await StoredResponses(service.store).body(caller, response_id)
    return Response(body, media_type="application/json")


@router.delete("/responses/{response_id}")
async def delete_response(response_id: str, service: ServiceNow, caller: ModelCallerNow) -> Response:
    """Delete a stored response. Its trace stays."""
    await StoredResponses(service.store).delete(caller, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def _call(request: Request, service: ModelApi, caller: Caller, body: bytes) -> ResponsesCall:
    fields = await decoded(lambda body: parse_body(ResponsesRequest, body), body)
    return await ResponsesCall.of(service, caller, fields, ClientHeaders.of(request.headers))


@router.api_route("/responses/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
async def nothing_kept(rest: str, caller: ModelCallerNow) -> Response:
    detail = (
        f"there is nothing at /responses/{shown(rest)[1:-1]}: a response can be read and deleted by its id; "
        "its conversation is in /v1/traces/{trace_id}, and each response names its trace_id"
    )
    raise ApiError(404, detail, param="response_id", code="not_found")
