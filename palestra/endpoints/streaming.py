"""Chat calls whose answers come in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import httpx
import msgspec

from palestra.net.chat_apis import AnswerPiece, ModelEndpoint, NotAnAnswer, error_of
from palestra.net.chat_apis.errors import EndpointError, EndpointSilent, ModelNotFound
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonObject

DATA, DONE = "data:", "[DONE]"
CONNECT_S, CALL_S = 10.0, 3600.0
SHOWN_CHARS = 300


async def stream_answer(
    endpoint: ModelEndpoint, messages: Sequence[Message], **options: object
) -> AsyncIterator[AnswerPiece]:
    """Gives the pieces of an answer. Raises EndpointError."""
    body = endpoint.api.body(endpoint.model, messages, {**options, "stream": True})
    timeout = httpx.Timeout(CALL_S, connect=CONNECT_S)
    headers = endpoint.api.headers(endpoint.api_key)
    try:
        async with (
            httpx.AsyncClient(timeout=timeout) as client,
            client.stream("POST", f"{endpoint.base_url}{endpoint.api.path}", json=body, headers=headers) as got,
        ):
            if got.status_code != 200:
                raise _refusal(endpoint, got.status_code, await got.aread())
            async for line in got.aiter_lines():
                if line.startswith(DATA) and (content := line.removeprefix(DATA).strip()) != DONE:
                    yield endpoint.api.piece(_event(endpoint, content))
    except NotAnAnswer as error:
        raise EndpointError(f"{endpoint.base_url} does not answer as a model endpoint does ({error})") from None
    except httpx.TransportError as error:
        detail = f" ({error})" if str(error) else ""
        raise EndpointSilent(f"{endpoint.base_url} does not answer{detail}") from None


def _event(endpoint: ModelEndpoint, content: str) -> JsonObject:
    try:
        event = msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise NotAnAnswer(str(error)) from None
    if (error := error_of(event)) is not None:
        raise EndpointError(f"{endpoint.base_url} could not go on: {error[0]}")
    return event


def _refusal(endpoint: ModelEndpoint, status: int, body: bytes) -> EndpointError:
    try:
        error = error_of(msgspec.json.decode(body))
    except msgspec.DecodeError:
        error = None
    detail = body[:SHOWN_CHARS].decode(errors="replace") if error is None else error[0]
    kind = ModelNotFound if status == 404 else EndpointError
    return kind(f"{endpoint.base_url} refuses the call ({status}): {' '.join(detail.split())}")
