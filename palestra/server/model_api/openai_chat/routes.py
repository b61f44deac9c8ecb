"""The model endpoint over HTTP. Thin: what the calls mean is in `service`."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from palestra.server.core.owners.callers import Caller
from palestra.server.http.access import CallerNow, ModelCallerNow
from palestra.server.http.body import decoded, read_body
from palestra.server.http.openapi import JSON_BODY, LINES, OR_EVENTS, OR_LINES, refusals
from palestra.server.model_api.answering import answered
from palestra.server.model_api.client_headers import ClientHeaders
from palestra.server.model_api.errors import OpenAIErrorEnvelope, OpenAIRoute, parse_body
from palestra.server.model_api.json_text import dumps
from palestra.server.model_api.openai_chat import schemas as s
from palestra.server.model_api.openai_chat.response_bodies import failed_chunk
from palestra.server.model_api.openai_chat.sampling_plan import CallOrigin
from palestra.server.model_api.service import ModelApi
from palestra.server.model_api.sse import KeepAlive
from palestra.util.json_types import JsonObject

PREFIXES = ("/v1", "/oai/api/v1")
"""The prefix of OpenAI's API, and the one of hosted Tinker."""
MAX_LISTED = 1000
PNG = "image/png"
C = TypeVar("C", bound=s.SamplingFields)

router = APIRouter(route_class=OpenAIRoute, responses=refusals(OpenAIErrorEnvelope), tags=["model endpoint"])
tokens = APIRouter(route_class=OpenAIRoute, responses=refusals(OpenAIErrorEnvelope), tags=["model endpoint"])


async def _service(request: Request) -> ModelApi:
    return request.app.state.model_api


ServiceNow = Annotated[ModelApi, Depends(_service)]
Limit = Annotated[int, Query(ge=1, le=MAX_LISTED)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]


@router.get("/models")
async def list_models(service: ServiceNow, caller: ModelCallerNow) -> JSONResponse:
    """The base models and the caller's aliases."""
    return JSONResponse(await service.list_models(caller))


@router.get("/models/{model:path}")
async def get_model(model: str, service: ServiceNow, caller: ModelCallerNow) -> JSONResponse:
    """One model by any of its names."""
    return JSONResponse(await service.model(caller, model))


@router.post("/chat/completions", openapi_extra=JSON_BODY, responses=OR_EVENTS)
async def chat_completions(request: Request, service: ServiceNow, caller: ModelCallerNow) -> Response:
    """OpenAI's chat completions, plain or streaming."""
    body = await read_body(request)
    call = await decoded(lambda body: parse_body(s.ChatRequest, body), body)
    origin = _origin(request, caller, call, "chat", f"chatcmpl-{secrets.token_hex(12)}")
    return await answered(
        request,
        body,
        origin,
        service.retries,
        plain=lambda: service.chat(origin),
        stream=service.stream_chat(origin) if call.stream else None,
        keep_alive=KeepAlive(failed_chunk),
    )


@router.post("/completions", openapi_extra=JSON_BODY, responses=OR_EVENTS)
async def completions(request: Request, service: ServiceNow, caller: ModelCallerNow) -> Response:
    """OpenAI's text completions, plain or streaming; also for token ids and for scoring a prompt."""
    body = await read_body(request)
    call = await decoded(lambda body: parse_body(s.CompletionRequest, body), body)
    origin = _origin(request, caller, call, "completions", f"cmpl-{secrets.token_hex(12)}")
    return await answered(
        request,
        body,
        origin,
        service.retries,
        plain=lambda: service.texts.answer(origin),
        stream=service.texts.stream(origin) if call.stream else None,
        keep_alive=KeepAlive(failed_chunk),
    )


def _origin(request: Request, caller: Caller, call: C, route: str, response_id: str) -> CallOrigin[C]:
    return CallOrigin(caller, call, route, response_id, ClientHeaders.of(request.headers), call.ignored())


@router.get("/traces", responses=OR_LINES)
async def list_traces(
    service: ServiceNow,
    caller: CallerNow,
    limit: Limit = 100,
    offset: Offset = 0,
    origin: Annotated[str | None, Query(max_length=256, pattern=r"^[^\x00]*$")] = None,
    format: Literal["json", "jsonl"] = "json",  # noqa: A002 - its name in the URL
) -> Response:
    """The caller's stored calls, newest first."""
    if format == "jsonl":
        return StreamingResponse(service.traces.export(caller, limit, offset, origin), media_type=LINES)
    return _json(await service.traces.page(caller, limit, offset, origin))


@router.get("/traces/{trace_id}", responses=OR_LINES)
async def get_trace(
    trace_id: str,
    service: ServiceNow,
    caller: CallerNow,
    format: Literal["json", "jsonl"] = "json",  # noqa: A002
) -> Response:
    """One trace: the tokens of every turn, and the messages of chats."""
    if format == "jsonl":
        return Response(await service.traces.lines(caller, trace_id), media_type=LINES)
    return _json(await service.traces.one(caller, trace_id))


@router.get("/traces/{trace_id}/trajectories")
async def get_trajectories(trace_id: str, service: ServiceNow, caller: CallerNow) -> Response:
    """A trace as training data: tokens, loss mask, log-probabilities, and where pictures stand."""
    return _json(await service.traces.trajectories(caller, trace_id))


@router.get("/pictures/{digest}", responses={200: {"content": {PNG: {}}}}, response_class=Response)
async def get_picture(
    digest: Annotated[str, Path(pattern="^[0-9a-f]{64}$")], service: ServiceNow, caller: CallerNow
) -> Response:
    """A picture of a trace, by the digest in its URL, as a PNG file of the pixels that the model read."""
    return Response(await service.picture(caller, digest), media_type=PNG)


@tokens.post("/tokenize", openapi_extra=JSON_BODY)
async def tokenize(request: Request, service: ServiceNow, caller: ModelCallerNow) -> Response:
    """Token ids of a text or a chat, as in vLLM."""
    call = await decoded(lambda body: parse_body(s.TokenizeRequest, body), await read_body(request))
    return _json(await service.tokenize(caller, call))


@tokens.post("/detokenize", openapi_extra=JSON_BODY)
async def detokenize(request: Request, service: ServiceNow, caller: ModelCallerNow) -> Response:
    """The text of token ids, as in vLLM."""
    call = await decoded(lambda body: parse_body(s.DetokenizeRequest, body), await read_body(request))
    return _json(await service.detokenize(caller, call))


def _json(body: JsonObject) -> Response:
    return Response(dumps(body), media_type="application/json")
