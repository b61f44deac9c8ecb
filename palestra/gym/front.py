"""A gym server over HTTP: a small ASGI application.

Owns: bodies and their limits, cookies as headers, health routes, `/openapi.json`. Never touches: sessions and
exceptions (`door.py`), what a path means. Whoever starts it opens and closes the server: lifespan messages do nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import orjson

from palestra import __version__
from palestra.gym.cookies import cookie_pair, cookies_of
from palestra.gym.door import Door
from palestra.gym.errors import BadCall
from palestra.gym.servers.base import GymServer
from palestra.gym.sessions import MAX_AGE_S
from palestra.gym.wire import NO_COOKIES, Answer, Call
from palestra.net.bodies import BodyReader

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
RawHeaders = Iterable[tuple[bytes, bytes]]

HEALTH = frozenset({"/", "/health", "/healthz", "/livez", "/readyz"})
MAX_BODY_BYTES = 256 << 20  # a long rollout carries all its token ids, three lists of them for each turn
MAX_BYTES_IN_ALL = 1 << 30  # of bodies that are on their way: whoever reaches the port may send some
SERVER_HEADER = b"x-gym-server"
"""Whose answer it is: what a supervisor looks at before it believes that a port is healthy."""
SESSION_COOKIE = f"; path=/; Max-Age={MAX_AGE_S}; httponly; samesite=lax".encode()
PLAIN_COOKIE = b"; path=/; samesite=lax"


class Front:
    """ASGI over one server."""

    def __init__(self, server: GymServer, secret: str, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.server = server
        self.door = Door(server, secret)
        self._bodies = BodyReader(max_bytes=max_body_bytes, max_bytes_in_all=MAX_BYTES_IN_ALL, refusal=BadCall)
        self._name = (SERVER_HEADER, server.name.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            answer = await self._answer(scope, headers, receive)
            await self._send(send, answer, is_head=scope["method"] == "HEAD")
        elif scope["type"] == "lifespan":
            await _live(receive, send)

    async def _answer(self, scope: Scope, headers: dict[str, str], receive: Receive) -> Answer:
        path, method = scope["path"], scope["method"]
        if method in ("GET", "HEAD"):
            return await self._looked(path)
        if method != "POST" or path in HEALTH:  # these have no body to read
            return Answer(status=405, body={"detail": "Method Not Allowed"})
        try:
            body = _parsed(await self._bodies.read(scope, receive))
        except BadCall as error:
            return Answer(status=error.status, body={"detail": error.detail})
        cookies = cookies_of(headers["cookie"]) if "cookie" in headers else NO_COOKIES
        return await self.door.answer(Call(path=path, body=body, cookies=cookies, headers=headers))

    async def _looked(self, path: str) -> Answer:
        if path in HEALTH:
            return Answer(body={"status": "ok"})
        if path == "/openapi.json":
            return Answer(body=openapi(self.server))
        try:
            found = await self.server.look(path)
        except Exception as error:
            log.error("%s%s broke", self.server.name, path, exc_info=error)
            return Answer(status=500, body=repr(error))
        if found is None:
            is_posted = path in self.server.routes()
            status, words = (405, "Method Not Allowed") if is_posted else (404, "Not Found")
            return Answer(status=status, body={"detail": words})
        return found

    async def _send(self, send: Send, answer: Answer, *, is_head: bool) -> None:
        try:
            body = answer.raw()
        except TypeError as error:  # orjson's: a server answered with what is no JSON
            log.error("%s gave an answer that is no JSON", self.server.name, exc_info=error)
            answer = Answer(status=500, body=repr(error), cookies=answer.cookies)
            body = answer.raw()
        headers = [
            (b"content-type", answer.content_type.encode("latin-1")),
            (b"content-length", b"%d" % len(body)),
            self._name,
            *((b"set-cookie", self._cookie(name, value)) for name, value in answer.cookies.items()),
        ]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if is_head else body})

    def _cookie(self, name: str, value: str) -> bytes:
        tail = SESSION_COOKIE if name == self.door.signer.name else PLAIN_COOKIE
        return cookie_pair(name, value).encode("latin-1", "replace") + tail


def _parsed(body: bytes) -> Any:
    if not body:
        return {}
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadCall(400, f"the body is not JSON: {error}") from None


def openapi(server: GymServer) -> dict[str, Any]:
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


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
