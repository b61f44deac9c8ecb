"""Heartbeats of sessions, answered before they reach the routes, and of many sessions together.

The SDK sends one every ten seconds for each session, and waits up to ten for the answer: of 2,000 idle sessions these
are nearly all calls. Through FastAPI one takes 1.1 ms of CPU at that pace, which would be a fifth of a core.

Owns: the heartbeat of a session that lives. Never touches: all others, which the route answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import msgspec
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palestra.server.core.callers import Caller
from palestra.server.core.errors import Refusal
from palestra.server.core.sessions import TinkerSessions
from palestra.server.http.auth import Authenticator

PATH = "/api/v1/session_heartbeat"
MANY = 200
"""With so many sessions, answers are held back: each client then sends fewer, and those of many leave together."""
HOLD_S = 4.0  # an answer waits for one to two of these; the SDK gives up after 10 s
MAX_BYTES = 4096
ANSWER = b'{"type":"session_heartbeat"}'
HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]


class Beat(msgspec.Struct):
    session_id: str


@dataclass(frozen=True, slots=True)
class HeartbeatRoute:
    """What metrics and logs call these requests."""

    path: str = PATH


ROUTE = HeartbeatRoute()


class Heartbeats:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, sessions: TinkerSessions, authenticator: Authenticator):
        self._app, self._sessions, self._authenticator = app, sessions, authenticator
        self._decoder = msgspec.json.Decoder(Beat)
        self._forming: asyncio.Event | None = None
        """Set when those that arrive now are answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await self._caller(scope) if scope.get("path") == PATH else None
        if caller is None:
            await self._app(scope, receive, send)
            return
        message = await receive()
        if not self._is_alive(message, caller):
            await self._app(scope, _again(message, receive), send)
            return
        scope["route"] = ROUTE
        if len(self._sessions.active) >= MANY:
            await self._hold()
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": ANSWER})

    async def _caller(self, scope: Scope) -> Caller | None:
        if scope["type"] == "http" and scope["method"] == "POST":
            with contextlib.suppress(Refusal):
                return await self._authenticator.admit(HTTPConnection(scope))
        return None

    def _is_alive(self, message: Message, caller: Caller) -> bool:
        """Whether this is a whole heartbeat of a session of the caller's; it counts from now on."""
        body = message.get("body", b"")
        if message.get("more_body") or len(body) > MAX_BYTES:
            return False
        try:
            session = self._sessions.find(self._decoder.decode(body).session_id, caller.owner)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        if session is not None:
            session.touch()
        return session is not None

    async def _hold(self) -> None:
        forming = self._forming
        if forming is None:
            forming = self._forming = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.call_later(HOLD_S, self._close)
            loop.call_later(2 * HOLD_S, forming.set)
        await forming.wait()

    def _close(self) -> None:
        self._forming = None


def _again(message: Message, receive: Receive) -> Receive:
    """Receives a message that was received already, then the following ones."""
    left = [message]

    async def again() -> Message:
        return left.pop() if left else await receive()

    return again
