"""A short way to the calls that come thousands of times a second: past FastAPI's routing and its dependencies.

Owns: finding such a route by its path, and calling it as FastAPI would. Never touches: what a route does, who may call.

FastAPI takes more than half of such a call's time: to find the route, and to solve dependencies that need nothing but
the request. The routes stay FastAPI's: it describes them, and gets whatever does not fit here.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute

from palestra.server.episodes import player_routes, routes

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ShortCut:
    """ASGI middleware around the whole app, its own middleware too: bodies are bounded and requests are logged around
    this one."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self._calls = {route.path: _Call(route) for route in _routes(player_routes.router)}
        (register,) = (route for route in _routes(routes.router) if route.endpoint is routes.register)
        self._register, self._run_name = _Call(register), re.compile(routes.RUN_NAME)
        self._before, _, self._after = register.path_format.partition("{run}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, names = self._find(scope)
        if call is None:
            await self.app(scope, receive, send)
            return
        scope["app"], scope["route"] = self.app, call.route
        request = Request(scope, receive, send)
        try:
            response = await call(request, names)
        except Exception as error:
            response = await _handler(self.app.exception_handlers, error)(request, error)
        await response(scope, receive, send)

    def _find(self, scope: Scope) -> tuple[_Call | None, dict[str, str]]:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None, {}
        path: str = scope["path"]
        if (call := self._calls.get(path)) is not None:
            return call, {}
        if path.startswith(self._before) and path.endswith(self._after):
            run = path[len(self._before) : -len(self._after)]
            if self._run_name.match(run):
                return self._register, {"run": run}
        return None, {}


class _Call:
    """A route's function, with what its signature asks for."""

    def __init__(self, route: APIRoute) -> None:
        self.route = route
        self._function = route.endpoint
        self._request = route.dependant.request_param_name
        self._needs: list[tuple[str, Any]] = [(str(one.name), one.call) for one in route.dependant.dependencies]

    async def __call__(self, request: Request, names: dict[str, str]) -> Any:
        values: dict[str, Any] = {**names}
        for name, needed in self._needs:
            values[name] = await needed(request)
        if self._request is not None:
            values[self._request] = request
        return await self._function(**values)


def _routes(router: APIRouter) -> list[APIRoute]:
    return [route for route in router.routes if isinstance(route, APIRoute)]


def _handler(handlers: Any, error: Exception) -> Any:
    """The app's for this kind of error; it has one for any."""
    return next(handlers[kind] for kind in type(error).__mro__ if kind in handlers)
