"""`/openenv/{app}/…`: paths and who may take them.

Owns: HTTP routes, handing WebSockets on. Never touches: frames, episodes. As in OpenEnv's own server a request over
HTTP begins and ends with a world of its own; what is to last is played over a WebSocket or in a session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from palestra.environments.platform.app import App
from palestra.environments.platform.catalog import app_of
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.faces.door import Door, Refusal
from palestra.environments.platform.faces.http import Bodies, JsonBytes, json_answer, object_of
from palestra.environments.platform.faces.openenv import tasks, wire
from palestra.environments.platform.faces.openenv.rpc import SESSION_HEADER, Rpc, SessionUnknown
from palestra.environments.platform.faces.openenv.sessions import Sessions, call_once, first_observation
from palestra.environments.platform.faces.openenv.sockets import Sockets
from palestra.environments.platform.faces.openenv.wire import CallTool, ErrorCode, ListTools, Mistake
from palestra.environments.platform.pool import Pool
from palestra.util.json_types import JsonObject

FRESH_STATE = {"episode_id": None, "step_count": 0, "task_key": None, "done": False}
Endpoint = Callable[[Request], Awaitable[Response]]


class OpenEnv:
    def __init__(self, pool: Pool, door: Door, bodies: Bodies, only: App | None = None) -> None:
        """`only`: the app, where no path names it."""
        self._door, self._bodies, self._only = door, bodies, only
        self._sessions = Sessions(pool)
        self._rpc = Rpc(self._sessions)
        self._sockets = Sockets(pool, self._sessions, self._rpc)

    def close(self) -> None:
        self._sessions.close_all()

    def routes(self) -> list[BaseRoute]:
        """Below the app's own path."""
        abouts: dict[str, Callable[[App], Any]] = {
            "/health": lambda app: {"status": "healthy"},
            "/metadata": wire.metadata,
            "/schema": lambda app: wire.schemas(),
            "/openapi.json": lambda app: wire.openapi(app.key),
            "/state": lambda app: FRESH_STATE,
            "/list_environments": lambda app: [app.key],
            "/{env_name}/splits": lambda app: tasks.splits(),
        }
        posts = {"/reset": _reset, "/step": _step, **{f"/{{env_name}}/{what}": _task(what) for what in tasks.PATHS}}
        return [
            *(Route(path, self._about(about)) for path, about in abouts.items()),
            *(Route(path, self._posted(answer), methods=["POST"]) for path, answer in posts.items()),
            Route("/mcp", self._message, methods=["POST"]),
            Route("/mcp", self._end_session, methods=["DELETE"]),
            WebSocketRoute("/ws", self._play),
            WebSocketRoute("/mcp", self._talk),
        ]

    # HTTP

    def _about(self, about: Callable[[App], Any]) -> Endpoint:
        """What can be read in the source, too: no key."""

        async def endpoint(request: Request) -> Response:
            return json_answer(about(self._app(request)))

        return endpoint

    def _posted(self, answer: Callable[[App, JsonObject], Awaitable[Any]]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            app = self._app(request)
            self._door.team(request.headers)
            try:
                return json_answer(await answer(app, object_of(await self._bodies.read(request))))
            except Mistake as e:
                raise Refusal(422 if e.code == ErrorCode.VALIDATION else 400, str(e)) from None

        return endpoint

    async def _message(self, request: Request) -> Response:
        app, team = self._app(request), self._door.team(request.headers)
        body = await self._bodies.read(request)
        try:
            answer, made = await self._rpc.posted(app, team, request.headers, body)
        except SessionUnknown:
            raise Refusal(404, "there is no such session (any more): initialize another") from None
        return JsonBytes(answer.body, answer.status, None if made is None else {SESSION_HEADER: made.id})

    async def _end_session(self, request: Request) -> Response:
        app, team = self._app(request), self._door.team(request.headers)
        session = self._sessions.find(request.headers.get(SESSION_HEADER), app, team)
        if session is None:
            raise Refusal(404, "there is no such session (any more)")
        self._sessions.close(session)
        return json_answer({"closed": True})

    # WebSockets

    async def _play(self, socket: WebSocket) -> None:
        app, team = self._app(socket), self._door.team(socket.headers)
        await socket.accept()
        await self._sockets.play(app, team, socket.query_params.get("session_id") or None, socket)

    async def _talk(self, socket: WebSocket) -> None:
        app, team = self._app(socket), self._door.team(socket.headers)
        await socket.accept()
        await self._sockets.talk(app, team, socket)

    def _app(self, connection: HTTPConnection) -> App:
        """Raises Refusal, also where the path names an environment that is another."""
        try:
            app = self._only or app_of(connection.path_params["app"])
        except PlatformError as e:
            raise Refusal(404, str(e)) from None
        env_name = connection.path_params.get("env_name", app.key)
        if env_name.lower() != app.key:
            raise Refusal(404, f"unknown environment {env_name[:64]!r}: this is {app.key}")
        return app


async def _reset(app: App, given: JsonObject) -> Any:
    return first_observation(await asyncio.to_thread(tasks.task_for, app, wire.reset_of(given)))


async def _step(app: App, given: JsonObject) -> Any:
    match wire.step_of(given):
        case ListTools():
            return wire.observed({"tools": wire.tools_shown(app.tools)}, {})
        case CallTool(tool_name=name, arguments=arguments):
            return wire.called(name, await asyncio.to_thread(call_once, app, name, arguments))
        case _:
            raise Mistake(ErrorCode.EXECUTION, "a step over HTTP has no task to finish: play it over a WebSocket (/ws)")


def _task(what: str) -> Callable[[App, JsonObject], Awaitable[Any]]:
    async def answer(app: App, given: JsonObject) -> Any:
        return await asyncio.to_thread(tasks.answer, app, what, given)

    return answer
