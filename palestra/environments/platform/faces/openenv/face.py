"""`/openenv/{app}/…`: paths and who may take them.

Owns: HTTP routes, handing WebSockets on. Never touches: frames, episodes. As in OpenEnv's own server a request over
HTTP begins and ends with a world of its own; what is to last is played over a WebSocket or in a session.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qs

import msgspec

from palestra.environments.platform.app import App
from palestra.environments.platform.catalog import app_of
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.faces.door import Door
from palestra.environments.platform.faces.http import (
    JSON_TYPE,
    Headers,
    Receive,
    Refusal,
    Scope,
    Send,
    answer,
    answer_json,
    object_of,
)
from palestra.environments.platform.faces.openenv import tasks, wire
from palestra.environments.platform.faces.openenv.rpc import SESSION_HEADER, Rpc, SessionUnknown
from palestra.environments.platform.faces.openenv.sessions import Sessions, call_once, first_observation
from palestra.environments.platform.faces.openenv.sockets import Sockets
from palestra.environments.platform.faces.openenv.wire import CallTool, ErrorCode, ListTools, Mistake
from palestra.environments.platform.pool import Pool
from palestra.net.bodies import BodyReader

TASK_PATHS = ("tasks", "num_tasks", "task", "task_range")
FRESH_STATE = {"episode_id": None, "step_count": 0, "task_key": None, "done": False}


class OpenEnv:
    def __init__(self, pool: Pool, door: Door, bodies: BodyReader) -> None:
        self._door, self._bodies, self._sessions = door, bodies, Sessions(pool)
        self._rpc = Rpc(self._sessions)
        self._sockets = Sockets(pool, self._sessions, self._rpc)

    def close(self) -> None:
        self._sessions.close_all()

    # HTTP

    async def http(self, path: str, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        """`path`: below `/openenv/`."""
        key, _, rest = path.partition("/")
        app, rest = _app(key), rest.rstrip("/")
        told = _about(app, rest) if scope["method"] == "GET" else None
        if told is not None:  # what can be read in the source, too: no key
            await answer_json(send, told)
            return
        team = self._door.team(headers)
        if rest == "mcp":
            await self._mcp(app, team, headers, scope, receive, send)
            return
        try:
            body = await self._bodies.read(scope, receive)
            await answer_json(send, await self._post(app, rest, scope["method"], body))
        except Mistake as e:
            status = 422 if e.code == ErrorCode.VALIDATION else 400
            raise Refusal(status, str(e)) from None

    async def _post(self, app: App, rest: str, method: str, body: bytes) -> Any:
        env_name, _, what = rest.partition("/")
        if rest not in ("reset", "step") and what not in TASK_PATHS:
            raise Refusal(404, f"there is no {rest[:100]!r} in /openenv/{app.key}; its openapi.json has what there is")
        if method != "POST":
            raise Refusal(405, f"POST to {rest[:100]!r}")
        given = object_of(body)
        if rest == "reset":
            return first_observation(await asyncio.to_thread(tasks.task_for, app, wire.reset_of(given)))
        if rest == "step":
            return await _step_once(app, wire.step_of(given))
        _check_name(app, env_name)
        return await asyncio.to_thread(tasks.answer, app, what, given)

    async def _mcp(self, app: App, team: str, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "DELETE":
            session = self._sessions.find(headers.get(SESSION_HEADER), app, team)
            if session is None:
                raise Refusal(404, "there is no such session (any more)")
            self._sessions.close(session)
            await answer_json(send, {"closed": True})
            return
        if scope["method"] != "POST":
            raise Refusal(405, "POST messages here")
        body = await self._bodies.read(scope, receive)
        try:
            (status, told), made = await self._rpc.posted(app, team, headers, body)
        except SessionUnknown:
            raise Refusal(404, "there is no such session (any more): initialize another") from None
        extra = [] if made is None else [(SESSION_HEADER.encode(), made.id.encode())]
        await answer(send, status, told, *extra)

    # WebSockets

    async def websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        try:
            app, what, team, session_id = self._checked(scope)
        except Refusal as e:
            await _refuse_socket(scope, send, e)
            return
        await send({"type": "websocket.accept"})
        if what == "ws":
            await self._sockets.play(app, team, session_id, receive, send)
        else:
            await self._sockets.talk(app, team, receive, send)

    def _checked(self, scope: Scope) -> tuple[App, str, str, str | None]:
        headers = Headers(scope["headers"])
        self._door.check_origin(headers)
        prefix, _, rest = scope["path"].lstrip("/").partition("/")
        key, _, what = rest.rstrip("/").partition("/")
        if prefix != "openenv" or what not in ("ws", "mcp"):
            raise Refusal(403, "WebSockets are at /openenv/{app}/ws and /openenv/{app}/mcp")
        named = parse_qs(scope["query_string"].decode("latin-1")).get("session_id")
        return _app(key), what, self._door.team(headers), named[-1] if named else None


def _app(key: str) -> App:
    try:
        return app_of(key)
    except PlatformError as e:
        raise Refusal(404, str(e)) from None


def _about(app: App, what: str) -> Any:
    """What an environment says of itself; None: it is something else that is asked for."""
    match what.split("/"):
        case ["health"]:
            return {"status": "healthy"}
        case ["metadata"]:
            return wire.metadata(app)
        case ["schema"]:
            return wire.schemas()
        case ["openapi.json"]:
            return wire.openapi(app.key)
        case ["state"]:
            return FRESH_STATE
        case ["list_environments"]:
            return [app.key]
        case [env_name, "splits"]:
            _check_name(app, env_name)
            return tasks.splits()
        case _:
            return None


def _check_name(app: App, env_name: str) -> None:
    if env_name.lower() != app.key:
        raise Refusal(404, f"unknown environment {env_name[:64]!r}: this is {app.key}")


async def _step_once(app: App, action: wire.Action) -> dict[str, Any]:
    match action:
        case ListTools():
            return wire.observed({"tools": wire.tools_of(app)}, {})
        case CallTool(tool_name=name, arguments=arguments):
            return wire.called(name, await asyncio.to_thread(call_once, app, name, arguments))
        case _:
            raise Mistake(ErrorCode.EXECUTION, "a step over HTTP has no task to finish: play it over a WebSocket (/ws)")


async def _refuse_socket(scope: Scope, send: Send, refusal: Refusal) -> None:
    """With the reason, where the server can say one before the handshake."""
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close"})
        return
    await send({"type": "websocket.http.response.start", "status": refusal.status, "headers": [JSON_TYPE]})
    await send({"type": "websocket.http.response.body", "body": msgspec.json.encode({"detail": refusal.detail})})
