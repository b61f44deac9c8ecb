"""The HTTP code that the APIs share: bodies, JSON, refusals.

Statuses are those that Fleet's SDK takes as final: after 404 and 5xx it waits and retries for seconds.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from palestra.environments.platform.api.auth import PlatformAuth, PlatformRefusal
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.pool_records import InstanceGone, InstanceOver
from palestra.net.bodies import BodyReader
from palestra.util.json_types import JsonObject

T = TypeVar("T")
MAX_BODY_BYTES = 4 << 20  # a tool call with its texts, a verifier's bundle
MAX_BYTES_IN_ALL = 256 << 20  # of all bodies that are being read


class JsonBytes(Response):
    """JSON that is already encoded."""

    media_type = "application/json"


def json_answer(content: object, status: int = 200) -> JsonBytes:
    return JsonBytes(msgspec.json.encode(content), status)


class PlatformBodies:
    """Reads whole bodies with a limit; the limit for all that are being read is shared."""

    def __init__(self, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._reader = BodyReader(max_bytes=max_bytes, max_bytes_in_all=MAX_BYTES_IN_ALL, refusal=PlatformRefusal)

    async def read(self, request: Request) -> bytes:
        return await self._reader.read(request.scope, request.receive)


def read_as(body: bytes, kind: type[T], problem: str = "the body is not valid JSON") -> T:
    """Parses a body. Raises PlatformRefusal with `problem` and what is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise PlatformRefusal(400, f"{problem}: {e}") from None


def object_of(body: bytes) -> JsonObject:
    """Parses an object; an empty body is an object without fields."""
    found = read_as(body or b"{}", object)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise PlatformRefusal(400, f"the body must be a JSON object, found {type(found).__name__}")
    return found


async def refused(_: HTTPConnection, error: Exception) -> Response:
    """Answers a refusal, also for a WebSocket before it is open."""
    match error:
        case PlatformRefusal():
            return json_answer({"detail": error.detail}, error.status)
        case HTTPException():
            return json_answer({"detail": error.detail}, error.status_code)
        case InstanceGone():
            status = 410
        case InstanceOver():
            status = 410 if error.record.is_over else 409
        case _:
            status = 400
    return json_answer({"detail": str(error)}, status)


REFUSALS: dict[Any, ExceptionHandler] = dict.fromkeys((PlatformRefusal, HTTPException, PlatformError), refused)


class EntranceMiddleware:
    """Comes before all routes: refuses requests of foreign web pages, and ignores a slash at the end of a path."""

    def __init__(self, app: ASGIApp, auth: PlatformAuth) -> None:
        self._app, self._auth = app, auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] != "lifespan":
            try:
                self._auth.check_origin(Headers(scope=scope))
            except PlatformRefusal as e:
                app = json_answer({"detail": e.detail}, e.status)
            if scope["path"].endswith("/"):
                scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await app(scope, receive, send)
