"""The model endpoint over HTTP. Thin: what the calls mean is in `service`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from palestra.server.openai import schemas as s
from palestra.server.openai.errors import ErrorEnvelope, OpenAIRoute, parse_body
from palestra.server.openai.runner import while_connected
from palestra.server.openai.service import OpenAIService
from palestra.server.tinker.access import CallerNow
from palestra.server.tinker.body import decoded, read_body

PREFIXES = ("/v1", "/oai/api/v1")
"""OpenAI's own, and hosted Tinker's."""
LINES = "application/x-ndjson"
OR_LINES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, LINES: {}}}}
"""With `format=jsonl`."""
MAX_LISTED = 1000

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorEnvelope, "description": "Refused; 429 asks to come back."}
}
_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}

router = APIRouter(route_class=OpenAIRoute, responses=_ERRORS, tags=["model endpoint"])
tokens = APIRouter(route_class=OpenAIRoute, responses=_ERRORS, tags=["model endpoint"])


async def _service(request: Request) -> OpenAIService:
    return request.app.state.openai


ServiceNow = Annotated[OpenAIService, Depends(_service)]
Limit = Annotated[int, Query(ge=1, le=MAX_LISTED)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]


@router.get("/models")
async def list_models(service: ServiceNow, caller: CallerNow) -> JSONResponse:
    return JSONResponse(service.list_models())


@router.get("/models/{model:path}")
async def get_model(model: str, service: ServiceNow, caller: CallerNow) -> JSONResponse:
    return JSONResponse(await service.model(caller, model))


@router.post("/chat/completions", openapi_extra=_BODY)
async def chat_completions(request: Request, service: ServiceNow, caller: CallerNow) -> Response:
    call = await decoded(lambda body: parse_body(s.ChatRequest, body), await read_body(request))
    return _json(await while_connected(request, service.chat(caller, call)))


@router.post("/completions", openapi_extra=_BODY)
async def completions(request: Request, service: ServiceNow, caller: CallerNow) -> Response:
    call = await decoded(lambda body: parse_body(s.CompletionRequest, body), await read_body(request))
    return _json(await while_connected(request, service.complete(caller, call)))


@router.get("/traces", responses=OR_LINES)
async def list_traces(
    service: ServiceNow,
    caller: CallerNow,
    limit: Limit = 100,
    offset: Offset = 0,
    format: Literal["json", "jsonl"] = "json",  # noqa: A002 - its name in the URL
) -> Response:
    if format == "jsonl":
        return StreamingResponse(service.traces.export(caller, limit, offset), media_type=LINES)
    return _json(await service.traces.page(caller, limit, offset))


@router.get("/traces/{trace_id}", responses=OR_LINES)
async def get_trace(
    trace_id: str,
    service: ServiceNow,
    caller: CallerNow,
    format: Literal["json", "jsonl"] = "json",  # noqa: A002
) -> Response:
    if format == "jsonl":
        return Response(await service.traces.lines(caller, trace_id), media_type=LINES)
    return _json(await service.traces.one(caller, trace_id))


@router.get("/traces/{trace_id}/trajectories")
async def get_trajectories(trace_id: str, service: ServiceNow, caller: CallerNow) -> Response:
    return _json(await service.traces.trajectories(caller, trace_id))


@tokens.post("/tokenize", openapi_extra=_BODY)
async def tokenize(request: Request, service: ServiceNow, caller: CallerNow) -> Response:
    call = await decoded(lambda body: parse_body(s.TokenizeRequest, body), await read_body(request))
    return _json(await service.tokenize(caller, call))


@tokens.post("/detokenize", openapi_extra=_BODY)
async def detokenize(request: Request, service: ServiceNow, caller: CallerNow) -> Response:
    call = await decoded(lambda body: parse_body(s.DetokenizeRequest, body), await read_body(request))
    return _json(await service.detokenize(caller, call))


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
