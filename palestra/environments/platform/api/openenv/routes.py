"""`/openenv/{app}/…`: paths, and who may use them.

As in OpenEnv's own server, a request over HTTP begins and ends with a world of its own; longer episodes are played
over a WebSocket or in a session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from palestra.environments.platform.api.auth import PlatformAuth, PlatformRefusal
from palestra.environments.platform.api.http import JsonBytes, PlatformBodies, json_answer, object_of
from palestra.environments.platform.api.openenv import tasks, wire
from palestra.environments.platform.api.openenv.rpc import SESSION_HEADER, OpenEnvRpc, SessionUnknown
from palestra.environments.platform.api.openenv.sessions import OpenEnvSessions, call_once, first_observation
from palestra.environments.platform.api.openenv.sockets import OpenEnvSockets
from palestra.environments.platform.api.openenv.wire import (
    CallTool,
    ClientMistake,
    ErrorCode,
    ListTools,
    Observation,
    OpenEnvState,
)
from palestra.environments.platform.app import TaskApp
from palestra.environments.platform.catalog import app_of
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.pool import InstancePool
from palestra.util.json_types import JsonObject, JsonPayload

FRESH_STATE: OpenEnvState = {"episode_id": None, "step_count": 0, "task_key": None, "done": False}
Endpoint = Callable[[Request], Awaitable[Response]]
BodyAnswer = Callable[[TaskApp, JsonObject], Awaitable[JsonPayload]]
"""Answers the body of a request."""


class OpenEnvRoutes:
    def __init__(
        self, pool: InstancePool, auth: PlatformAuth, bodies: PlatformBodies, only: TaskApp | None = None
    ) -> None:
        """`only` is the app, if no path names it."""
        self._auth, self._bodies, self._only = auth, bodies, only
        self._sessions = OpenEnvSessions(pool)
        self._rpc = OpenEnvRpc(self._sessions)
        self._sockets = OpenEnvSockets(pool, self._sessions, self._rpc)

    def close(self) -> None:
        self._sessions.close_all()

    def routes(self) -> list[BaseRoute]:
        """Returns the routes below the app's own path."""
        abouts: dict[str, Callable[[TaskApp], Any]] = {
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

    def _about(self, about: Callable[[TaskApp], Any]) -> Endpoint:
        """Answers with information that is in the source code, too, so no key is needed."""

        async def endpoint(request: Request) -> Response:
            return json_answer(about(self._app(request)))

        return endpoint

    def _posted(self, answer: BodyAnswer) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            app = self._app(request)
            self._auth.team(request.headers)
            try:
                return json_answer(await answer(app, object_of(await self._bodies.read(request))))
            except ClientMistake as e:
                raise PlatformRefusal(422 if e.code == ErrorCode.VALIDATION else 400, str(e)) from None

        return endpoint

    async def _message(self, request: Request) -> Response:
        app, team = self._app(request), self._auth.team(request.headers)
        body = await self._bodies.read(request)
        try:
            answer, made = await self._rpc.posted(app, team, request.headers, body)
        except SessionUnknown:
            raise PlatformRefusal(404, "there is no such session, or it has ended; initialize another") from None
        return JsonBytes(answer.body, answer.status, None if made is None else {SESSION_HEADER: made.id})

    async def _end_session(self, request: Request) -> Response:
        app, team = self._app(request), self._auth.team(request.headers)
        session = self._sessions.find(request.headers.get(SESSION_HEADER), app, team)
        if session is None:
            raise PlatformRefusal(404, "there is no such session, or it has ended")
        self._sessions.close(session)
        return json_answer({"closed": True})

    # WebSockets

    async def _play(self, socket: WebSocket) -> None:
        app, team = self._app(socket), self._auth.team(socket.headers)
        await socket.accept()
        await self._sockets.play(app, team, socket.query_params.get("session_id") or None, socket)

    async def _talk(self, socket: WebSocket) -> None:
        app, team = self._app(socket), self._auth.team(socket.headers)
        await socket.accept()
        await self._sockets.talk(app, team, socket)

    def _app(self, connection: HTTPConnection) -> TaskApp:
        """Returns the app. Raises PlatformRefusal, also if the path names another environment."""
        try:
            app = self._only or app_of(connection.path_params["app"])
        except PlatformError as e:
            raise PlatformRefusal(404, str(e)) from None
        env_name = connection.path_params.get("env_name", app.key)
        if env_name.lower() != app.key:
            raise PlatformRefusal(404, f"unknown environment {env_name[:64]!r}; this one is {app.key}")
        return app


async def _reset(app: TaskApp, given: JsonObject) -> Observation:
    return first_observation(await asyncio.to_thread(tasks.task_for, app, wire.reset_of(given)))


async def _step(app: TaskApp, given: JsonObject) -> Observation:
    match wire.step_of(given):
        case ListTools():
            return wire.observed({"tools": wire.tools_shown(app.tools)}, {})
        case CallTool(tool_name=name, arguments=arguments):
            return wire.called(name, await asyncio.to_thread(call_once, app, name, arguments))
        case _:
            raise ClientMistake(
                ErrorCode.EXECUTION, "a step over HTTP cannot finish a task; play it over a WebSocket (/ws)"
            )


def _task(what: str) -> BodyAnswer:
    async def answer(app: TaskApp, given: JsonObject) -> JsonPayload:
        return await asyncio.to_thread(tasks.answer, app, what, given)

    return answer
