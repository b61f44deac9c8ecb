"""Anthropic's Messages over HTTP. Thin: what a call means is in `request`; answers are in `response_body` and
`stream`."""

from __future__ import annotations

import asyncio
import json
import secrets

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from palestra.server.core.owners.callers import Caller
from palestra.server.http.access import ModelCallerNow
from palestra.server.http.body import decoded, read_body
from palestra.server.http.openapi import JSON_BODY, OR_EVENTS, refusals
from palestra.server.model_api.answering import answered
from palestra.server.model_api.anthropic_messages import stream
from palestra.server.model_api.anthropic_messages.errors import NAMES, AnthropicErrorEnvelope, AnthropicRoute, headers
from palestra.server.model_api.anthropic_messages.request import chat_request, counted_request, ignores_thinking
from palestra.server.model_api.anthropic_messages.response_body import whole
from palestra.server.model_api.anthropic_messages.schemas import CountRequest, MessagesRequest
from palestra.server.model_api.client_headers import ClientHeaders
from palestra.server.model_api.errors import parse_body
from palestra.server.model_api.openai_chat import routes as openai_routes
from palestra.server.model_api.openai_chat.routes import ServiceNow
from palestra.server.model_api.openai_chat.sampling_plan import CallOrigin
from palestra.server.model_api.service import ModelApi
from palestra.server.model_api.sse import KeepAlive

ROUTE = "messages"
OWN_PREFIX = "/anthropic/v1"
PREFIXES = (*openai_routes.PREFIXES, OWN_PREFIX)
PATHS = (*(f"{prefix}/messages" for prefix in openai_routes.PREFIXES), "/anthropic/")
"""Paths that begin like this belong to Anthropic's API."""

router = APIRouter(route_class=AnthropicRoute, responses=refusals(AnthropicErrorEnvelope), tags=["model endpoint"])


@router.post("/messages", openapi_extra=JSON_BODY, responses=OR_EVENTS)
async def messages(request: Request, service: ServiceNow, caller: ModelCallerNow) -> Response:
    """Anthropic's Messages, plain or streaming."""
    body = await read_body(request)
    call = await decoded(lambda body: parse_body(MessagesRequest, body), body)
    translated = await asyncio.to_thread(chat_request, call, service.tools)
    origin = CallOrigin(
        caller,
        translated.chat,
        ROUTE,
        f"msg_{secrets.token_hex(12)}",
        ClientHeaders.of(request.headers),
        [*translated.ignored, *await _ignored(service, caller, call)],
        NAMES,
    )

    async def work() -> bytes:
        answer = await service.chats.answer(origin)
        return json.dumps(whole(answer, call), ensure_ascii=False).encode()  # orjson refuses a model's large numbers

    response = await answered(
        request,
        body,
        origin,
        service.retries,
        plain=work,
        stream=stream.lines(service.chats.stream(origin), call, origin.response_id) if call.stream else None,
        keep_alive=KeepAlive(stream.failed, stream.PING_LINE),
    )
    response.headers.update(headers())
    return response


@router.post("/messages/count_tokens", openapi_extra=JSON_BODY)
async def count_tokens(request: Request, service: ServiceNow, caller: ModelCallerNow) -> Response:
    """Count the tokens that a Messages request would read."""
    call = await decoded(lambda body: parse_body(CountRequest, body), await read_body(request))
    count = await service.chats.count_tokens(caller, await asyncio.to_thread(counted_request, call, service.tools))
    return JSONResponse({"input_tokens": count}, headers=headers())


async def _ignored(service: ModelApi, caller: Caller, call: MessagesRequest) -> list[str]:
    """Returns what this model's template ignores."""
    if call.thinking is None:
        return []
    tokenizer = await service.models.tokenizer(await service.models.find(caller, call.model))
    return ["thinking"] if ignores_thinking(call, tokenizer) else []
