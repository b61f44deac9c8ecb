"""Calls of a server to itself, without a socket."""

from __future__ import annotations

import json
from base64 import b64decode
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from uuid import uuid4

from itsdangerous import BadSignature, TimestampSigner
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope

MAX_AGE_S = 14 * 24 * 3600  # of the session's cookie, as Starlette sets it


@dataclass(frozen=True, slots=True)
class InProcessResponse:
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    def value(self) -> Any:
        """Parsed; None where it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def response(self) -> Response:
        made = Response(self.body, status_code=self.status)
        made.raw_headers = [*self.headers]
        return made

    def with_value(self, value: object) -> Response:
        body = json.dumps(value).encode()
        made = Response(body, status_code=self.status)
        kept = [pair for pair in self.headers if pair[0].lower() != b"content-length"]
        made.raw_headers = [*kept, (b"content-length", str(len(body)).encode())]
        return made


async def body_of(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def post_within(app: ASGIApp, scope: Scope, body: bytes, cookie: str | None = None) -> InProcessResponse:
    """To the scope's path; `cookie` instead of those it has. A failure that became no answer rises."""
    dropped = {b"content-length", b"content-type", b"transfer-encoding", *((b"cookie",) if cookie else ())}
    headers = [pair for pair in scope["headers"] if pair[0] not in dropped]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"cookie", cookie.encode("latin-1"))] if cookie else []
    begun: list[Any] = []
    parts: list[bytes] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            begun.append(message)
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app({**scope, "method": "POST", "headers": headers}, receive, send)
    return InProcessResponse(begun[0]["status"], list(begun[0]["headers"]), b"".join(parts))


def session_in(scope: Scope, name: str, signer: TimestampSigner) -> tuple[str, bool]:
    """The session of the caller's cookie; else a new one, and True."""
    cookies: SimpleCookie = SimpleCookie()
    for header, value in scope["headers"]:
        if header == b"cookie":
            try:
                cookies.load(value.decode("latin-1"))
            except CookieError:
                continue
    try:
        found = json.loads(b64decode(signer.unsign(cookies[name].value, max_age=MAX_AGE_S)))["session_id"]
    except (BadSignature, KeyError, ValueError):
        return str(uuid4()), True
    return found, False
