"""A gym server as its callers see it: inside a process, and over HTTP with one Starlette endpoint for all paths.

The caller opens and closes the server.
"""

from __future__ import annotations

import logging
import re
import time

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import Receive, Scope, Send

from palestra import __version__
from palestra.gym.errors import BadCall, GymConfigError, GymError
from palestra.gym.servers.base import GymServer
from palestra.gym.sessions import MAX_AGE_S, SessionSigner
from palestra.gym.wire import NO_COOKIES, GymRequest, GymResponse
from palestra.net.bodies import BodyReader
from palestra.net.cookies import cookie_pair, cookies_of
from palestra.types.gym_calls import STATS
from palestra.util.json_types import JsonObject

log = logging.getLogger(__name__)

HEALTH = frozenset({"/", "/health", "/healthz", "/livez", "/readyz"})
MAX_BODY_BYTES = 256 << 20  # a long rollout carries all its token ids, three lists of them for each turn
MAX_BYTES_IN_ALL = 1 << 30  # of all bodies that are being read: whoever reaches the port may send some
SERVER_HEADER = "x-gym-server"
"""Names the server that answers: a supervisor checks it before it believes that a port is healthy."""
SESSION_COOKIE = f"; path=/; Max-Age={MAX_AGE_S}; httponly; samesite=lax"
PLAIN_COOKIE = "; path=/; samesite=lax"


class GymHttpApp:
    """An ASGI app for one server."""

    def __init__(self, server: GymServer, secret: str, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.server = server
        self.endpoint = ServerEndpoint(server, secret)
        self._bodies = BodyReader(max_bytes=max_body_bytes, max_bytes_in_all=MAX_BYTES_IN_ALL, refusal=BadCall)
        self._app = request_response(self._respond)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        return self._response(await self._answer(request))

    async def _answer(self, request: Request) -> GymResponse:
        path = request.scope["path"]
        if request.method in ("GET", "HEAD"):
            return await self._looked(path)
        if request.method != "POST" or path in HEALTH:  # these have no body to read
            return GymResponse(status=405, body={"detail": "Method Not Allowed"})
        try:
            body = _parsed(await self._bodies.read(request.scope, request.receive))
        except BadCall as error:
            return GymResponse(status=error.status, body={"detail": error.detail})
        cookies = cookies_of(request.headers["cookie"]) if "cookie" in request.headers else NO_COOKIES
        return await self.endpoint.answer(GymRequest(path=path, body=body, cookies=cookies, headers=request.headers))

    async def _looked(self, path: str) -> GymResponse:
        if path in HEALTH:
            return GymResponse(body={"status": "ok"})
        if path == "/openapi.json":
            return GymResponse(body=openapi(self.server))
        try:
            found = await self.server.look(path)
        except Exception as error:  # boundary: a server's own code; callers get an answer
            log.error("%s%s broke", self.server.name, path, exc_info=error)
            return GymResponse(status=500, body=repr(error))
        if found is None and path == STATS:
            return GymResponse(body=msgspec.to_builtins(self.server.calls.read()))
        if found is None:
            is_posted = path in self.server.routes()
            status, detail = (405, "Method Not Allowed") if is_posted else (404, "Not Found")
            return GymResponse(status=status, body={"detail": detail})
        return found

    def _response(self, answer: GymResponse) -> Response:
        try:
            body = answer.raw()
        except TypeError as error:  # from orjson: a server answered with something that is not JSON
            log.error("%s returned an answer that is not JSON", self.server.name, exc_info=error)
            answer = GymResponse(status=500, body=repr(error), cookies=answer.cookies)
            body = answer.raw()
        headers = {"content-type": answer.content_type, SERVER_HEADER: self.server.name}
        response = Response(body, answer.status, headers)
        for name, value in answer.cookies.items():
            tail = SESSION_COOKIE if name == self.endpoint.signer.name else PLAIN_COOKIE
            response.raw_headers.append((b"set-cookie", (cookie_pair(name, value) + tail).encode("latin-1", "replace")))
        return response


def _parsed(body: bytes) -> object:
    if not body:
        return {}
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadCall(400, f"the body is not JSON: {error}") from None


def openapi(server: GymServer) -> JsonObject:
    paths = {
        path: {
            "post": {
                "operationId": path.strip("/").replace("/", "_"),
                "requestBody": {"content": {"application/json": {"schema": schema}}},
                "responses": {"200": {"description": "as the server's kind says"}},
            }
        }
        for path, schema in server.routes().items()
    }
    return {"openapi": "3.1.0", "info": {"title": server.name, "version": __version__}, "paths": paths}


BAD_REQUEST = 400
ROLLOUT_PREFIX = "/ng-rollout/"
PREFIXED = re.compile(r"/ng-rollout/([A-Za-z0-9][A-Za-z0-9._-]*)(/training-token-capture)?(/.*)")
COOKIE_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class ServerEndpoint:
    __slots__ = ("server", "signer")

    def __init__(self, server: GymServer, secret: str) -> None:
        if not COOKIE_NAME.fullmatch(server.cookie_name):
            raise GymConfigError(
                f"the server name {server.name!r} cannot be part of a cookie: use letters, digits, _ - ."
            )
        self.server = server
        self.signer = SessionSigner(server.cookie_name, secret)

    async def answer(self, call: GymRequest) -> GymResponse:
        """Always returns an answer, with the session's cookie."""
        call.session_id = self.signer.session_from(call.cookies)
        try:
            _take_prefix(call)
            found = await self._counted(call)
        except BadCall as error:
            found = self._failure(call, error)
        cookies = {**found.cookies, self.signer.name: self.signer.signed(call.session_id)}
        return GymResponse(status=found.status, body=found.body, cookies=cookies, content_type=found.content_type)

    async def _counted(self, call: GymRequest) -> GymResponse:
        calls, began_s, failure = self.server.calls, time.perf_counter(), "cancelled"
        count = calls.begin(call.path)
        try:
            found = await self.server.answer(call)
            failure = None if found.status < BAD_REQUEST else str(found.status)
        except Exception as error:  # boundary: a server's own code; callers get an answer
            found = self._failure(call, error)
            known = error.failure if isinstance(error, GymError) else None
            failure = str(known.kind) if known is not None else str(found.status)
        finally:
            calls.end(count, time.perf_counter() - began_s, failure)
        return found

    def _failure(self, call: GymRequest, error: Exception) -> GymResponse:
        if isinstance(error, BadCall):
            return GymResponse(status=error.status, body={"detail": error.detail})
        failure = error.failure if isinstance(error, GymError) else None
        if failure is not None:
            log.warning("%s%s: %s: %s", self.server.name, call.path, failure.kind, failure.reason)
            return GymResponse(status=422 if failure.is_final else 500, body=failure.fields())
        log.error("%s%s broke", self.server.name, call.path, exc_info=error)
        return GymResponse(status=500, body=repr(error))


def _take_prefix(call: GymRequest) -> None:
    if not call.path.startswith(ROLLOUT_PREFIX):
        return
    found = PREFIXED.fullmatch(call.path)
    if found is None:
        raise BadCall(404, "Not Found")
    call.rollout_id, call.captures_tokens, call.path = found[1], found[2] is not None, found[3]
