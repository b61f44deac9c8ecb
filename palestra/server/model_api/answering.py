"""Answers a call over HTTP, whole or as a stream, and says in a header what of the request was ignored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from fastapi import Request, Response

from palestra.server.model_api.idempotency import IdempotentCalls
from palestra.server.model_api.openai_chat.sampling_plan import CallOrigin
from palestra.server.model_api.openai_chat.schemas import SamplingFields
from palestra.server.model_api.request_fields import ignored_header
from palestra.server.model_api.sse import KeepAlive, sse


async def answered(
    request: Request,
    body: bytes,
    origin: CallOrigin[SamplingFields],
    retries: IdempotentCalls,
    *,
    plain: Callable[[], Coroutine[Any, Any, bytes]],
    stream: AsyncGenerator[bytes, None] | None,
    keep_alive: KeepAlive,
) -> Response:
    """`plain` makes the body of an answer that is sent whole; `stream`: the events of one that is not."""
    if stream is not None:
        response: Response = await sse(request, stream, keep_alive)
    else:
        response = await retries.answer(request, origin.caller, body, origin.response_id, plain)
    response.headers.update(ignored_header(origin.ignored))
    return response
