"""The platform over HTTP: one application for Fleet's control plane, runners, MCP and OpenEnv.

Paths, and what opens them:

    /v1/…                    the control plane, with a team's key
    /i/{id}/mcp              an instance's tools; also /i/{id}/api/v1/mcp
    /i/{id}/api/v1/env/…     its runner, with the team's token
    /{app}/api/v1/env/…      one app of a world of several, with the login of an instance
    /openenv/{app}/…         an app as an OpenEnv environment, with a team's key
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Receive, Scope, Send

from palestra.environments.platform.api.auth import PlatformAuth, PlatformRefusal, login_of
from palestra.environments.platform.api.control import ControlPlane, ControlRequest
from palestra.environments.platform.api.http import REFUSALS, EntranceMiddleware, JsonBytes, PlatformBodies, json_answer
from palestra.environments.platform.api.mcp import mcp_answer, mcp_refusal
from palestra.environments.platform.api.openenv.routes import OpenEnvRoutes
from palestra.environments.platform.api.runner import InstanceRunner, RunnerRequest
from palestra.environments.platform.api.verification import VerifierService
from palestra.environments.platform.pool import InstancePool
from palestra.environments.platform.pool_records import InstanceGone, InstanceOver
from palestra.environments.platform.verifiers.source import verifier_source

log = logging.getLogger(__name__)

TICK_S = 1.0
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
MAX_REQUEST_ID = 200
# of a call to an instance that does not exist: enough to find the request id for the answer
MAX_STRANGERS_BYTES = 64 << 10

Endpoint = Callable[[Request], Awaitable[Response]]


class Asgi:
    """An endpoint without Starlette's own handling of exceptions, since the application has that already: a tool call
    takes 5 % less CPU."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._endpoint(Request(scope, receive))
        await response(scope, receive, send)


class PlatformApp(Starlette):
    def __init__(self, pool: InstancePool, auth: PlatformAuth, public_url: str | None = None) -> None:
        """`public_url`: the address at which clients find the server, if it differs from the name they used."""
        self.pool, self._auth = pool, auth
        self._public_url = None if public_url is None else public_url.rstrip("/")
        self._bodies, self._strangers = PlatformBodies(), PlatformBodies(MAX_STRANGERS_BYTES)
        self._openenv = OpenEnvRoutes(pool, auth, self._bodies)
        verifying = VerifierService(pool, verifier_source)
        routes: list[BaseRoute] = [
            *(Route(f"/i/{{id}}/{path}", Asgi(self._mcp)) for path in ("mcp", "api/v1/mcp")),
            *self._runner_routes(InstanceRunner(pool, verifying)),
            Route("/i/{id}", self._instance),
            *self._control_routes(ControlPlane(pool, auth, verifier_source), verifying),
            Mount("/openenv/{app}", routes=self._openenv.routes()),
            Route("/healthz", _healthy),
            Route("/{path:path}", _nothing, methods=METHODS),
        ]
        entrance = [Middleware(EntranceMiddleware, auth=auth)]
        super().__init__(routes=routes, middleware=entrance, exception_handlers=REFUSALS, lifespan=self._live)

    @asynccontextmanager
    async def _live(self, _: Starlette) -> AsyncIterator[None]:
        async with reaping(self.pool):
            yield
            self._openenv.close()

    # An instance

    async def _mcp(self, request: Request) -> Response:
        if request.method != "POST":  # no streams, no sessions to end
            return JsonBytes(mcp_refusal(b"", "POST messages here"), 405, {"allow": "POST"})
        instance_id = request.path_params["id"]
        body = await self._bodies_for(instance_id).read(request)
        try:
            with self.pool.use(instance_id) as instance:
                answer = mcp_answer(instance.app, instance.call, request.headers, body)
        except (InstanceGone, InstanceOver) as e:
            return JsonBytes(mcp_refusal(body, str(e)), 410)
        return JsonBytes(answer.body, answer.status)

    def _bodies_for(self, instance_id: str) -> PlatformBodies:
        """Returns the body reader of an instance: knowing its id is what gives access."""
        try:
            self.pool.record(instance_id)
        except InstanceGone:
            return self._strangers
        return self._bodies

    async def _instance(self, request: Request) -> Response:
        record = self.pool.record(request.path_params["id"])
        return json_answer({"app": record.wanted.app, "status": record.state, "mcp": "mcp"})

    def _runner_routes(self, runner: InstanceRunner) -> list[Mount]:
        """Returns the same routes for an instance and for one app of a world: the SDK's `env.app(name)` keeps
        everything before the path of the runner's address, or replaces the instance by the app. The login says which
        instance is meant."""
        routes = [
            Route("/resources", self._ran(runner.resources)),
            Route("/health", self._ran(runner.health)),
            Route("/resources/sqlite/{resource}/describe", self._ran(runner.describe)),
            Route("/resources/sqlite/{resource}/query", self._ran(runner.query), methods=["POST"]),
            Route("/diff/structured", self._ran(runner.diff), methods=["POST"]),
            Route("/reset", self._ran(runner.reset), methods=["POST"]),
            Route("/execute_verifier_function", self._ran(runner.execute_verifier), methods=["POST"]),
            Route("/{path:path}", _nothing, methods=METHODS),
        ]
        return [Mount(f"{path}/api/v1/env", routes=routes) for path in ("/i/{id}", "/{part}")]

    def _ran(self, handler: Callable[[RunnerRequest], Any]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            instance_id, part = _meant(request)
            record = self.pool.record(instance_id)
            self._auth.check_runner(request.headers, record)
            if record.is_over:
                raise InstanceOver(record)
            body = await self._bodies.read(request)
            answer = handler(RunnerRequest(instance_id, part, request.path_params.get("resource", ""), body))
            return json_answer(await answer if inspect.isawaitable(answer) else answer)

        return endpoint

    # The control plane

    def _control_routes(self, control: ControlPlane, verifying: VerifierService) -> list[Route]:
        handlers: list[tuple[str, str, Callable[[ControlRequest], Any]]] = [
            ("GET", "env", control.environments),
            ("POST", "env/instances", control.make),
            ("GET", "env/instances", control.instances),
            ("GET", "env/runs", control.runs),
            ("GET", "env/{name}", control.environment),
            ("DELETE", "env/instances/batch", control.close_all),
            ("GET", "env/instances/{name}", control.instance),
            ("DELETE", "env/instances/{name}", control.close),
            ("POST", "env/instances/{name}/heartbeat", control.heartbeat),
            ("GET", "regions", control.regions),
            ("GET", "account", control.account),
            ("GET", "runner-auth/token", control.runner_token),
            ("GET", "tasks", control.tasks),
            ("POST", "tasks", control.keep_task),
            ("GET", "tasks/{name}", control.task),
            ("PUT", "tasks/{name}", control.keep_task),
            ("GET", "verifiers/check", verifying.check),
            ("POST", "verifiers/execute", verifying.execute),
            ("GET", "verifiers/{name}", verifying.source),
        ]
        return [
            Route(f"/v1/{path}", self._control_endpoint(handler), methods=[method])
            for method, path, handler in handlers
        ]

    def _control_endpoint(self, handler: Callable[[ControlRequest], Any]) -> Endpoint:
        """Runs handlers that are not coroutines in a thread: building a new world takes tens of milliseconds."""

        async def endpoint(request: Request) -> Response:
            headers = request.headers
            body = ControlRequest(
                team=self._auth.team(headers),
                base_url=self._public_url or f"{request.scope['scheme']}://{headers.get('host')}",
                query=request.query_params,
                body=await self._bodies.read(request),
                request_id=headers.get("x-request-id", "")[:MAX_REQUEST_ID] or None,
                name=request.path_params.get("name", ""),
            )
            if inspect.iscoroutinefunction(handler):
                return json_answer(await handler(body))
            return json_answer(await asyncio.to_thread(handler, body))

        return endpoint


@asynccontextmanager
async def reaping(pool: InstancePool) -> AsyncIterator[None]:
    """Ends instances whose time is over, as long as the block lasts."""
    reaper = asyncio.create_task(_reap(pool), name="platform-reaper")
    yield
    reaper.cancel()
    with suppress(asyncio.CancelledError):
        await reaper


async def _reap(pool: InstancePool) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        try:
            pool.tick()
        except Exception:  # boundary: whatever it is, other instances must still be ended
            log.exception("removing expired instances failed; trying again")


def _meant(request: Request) -> tuple[str, str]:
    """Returns the instance and, in a world of several apps, the app that is meant; empty: all of it."""
    known = login_of(request.headers).partition(":")[0]
    named = request.path_params.get("id")
    if named is not None and known in ("", named):
        return named, ""
    if not known:
        path = request.url.path[:100]
        raise PlatformRefusal(403, f"{path!r} needs the address of an instance of a world (urls.manager.api)")
    return known, named or request.path_params["part"]


async def _healthy(_: Request) -> Response:
    return json_answer({"status": "ok"})


async def _nothing(request: Request) -> Response:
    raise PlatformRefusal(400, f"there is no {request.method} {request.url.path[:100]!r} here; see docs/platform.md")
