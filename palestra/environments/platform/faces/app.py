"""The platform over HTTP: one ASGI application for Fleet's control plane, runners, MCP and OpenEnv.

Owns: paths, errors as answers, the reaper's beat. Never touches: what a route does.

    /v1/…                    the control plane, with a team's key
    /i/{id}/mcp              an instance's tools; also /i/{id}/api/v1/mcp
    /i/{id}/api/v1/env/…     its runner, with the team's token
    /{app}/api/v1/env/…      one app of a world of several, with the login of an instance
    /openenv/{app}/…         an app as an OpenEnv environment, with a team's key
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from palestra.environments.fleet.export import verifier_source
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.faces.control import Asked, ControlPlane
from palestra.environments.platform.faces.door import Door, login_of
from palestra.environments.platform.faces.http import (
    Headers,
    Receive,
    Refusal,
    Scope,
    Send,
    answer,
    answer_json,
    body_reader,
    refuse,
)
from palestra.environments.platform.faces.mcp import mcp_answer, mcp_refusal
from palestra.environments.platform.faces.openenv import OpenEnv
from palestra.environments.platform.faces.runner import Runner
from palestra.environments.platform.faces.verifying import Verifying
from palestra.environments.platform.pool import Pool
from palestra.environments.platform.pool_records import InstanceGone, InstanceOver
from palestra.net.bodies import BodyReader

log = logging.getLogger(__name__)

TICK_S = 1.0
MCP_PATHS = ("mcp", "mcp/", "api/v1/mcp", "api/v1/mcp/")
RUNNER_PATH = "api/v1/env/"
OPENENV_PATH = "/openenv/"
MAX_REQUEST_ID = 200
MAX_STRANGERS_BYTES = 64 << 10  # of a call to an instance that is not there: for the number it is to be answered with
PART = re.compile(r"/(i/)?([^/]+)/api/v1/env/(.*)")

Handler = Callable[[Asked], Any]


class PartAsked(NamedTuple):
    """One app of a world of several."""

    instance_id: str
    app: str
    rest: str


class PlatformApp:
    def __init__(self, pool: Pool, door: Door, public_url: str | None = None) -> None:
        """`public_url`: where clients find us, if not under the name they used."""
        self.pool, self._door = pool, door
        self._public_url = None if public_url is None else public_url.rstrip("/")
        self._verifying = Verifying(pool, verifier_source)
        self._runner = Runner(pool, self._verifying)
        self._bodies, self._strangers = body_reader(), body_reader(MAX_STRANGERS_BYTES)
        self._openenv = OpenEnv(pool, door, self._bodies)
        self._routes = self._table(ControlPlane(pool, door, verifier_source))

    def _table(self, control: ControlPlane) -> dict[tuple[str, int], list[tuple[list[str], Handler]]]:
        """By method and length; `*` stands for a name. The first that fits is taken. What is no coroutine runs in a
        thread: worlds that nobody asked for before take tens of milliseconds to build."""
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "env", control.environments),
            ("POST", "env/instances", control.make),
            ("GET", "env/instances", control.instances),
            ("GET", "env/runs", control.runs),
            ("GET", "env/*", control.environment),
            ("DELETE", "env/instances/batch", control.close_all),
            ("GET", "env/instances/*", control.instance),
            ("DELETE", "env/instances/*", control.close),
            ("POST", "env/instances/*/heartbeat", control.heartbeat),
            ("GET", "regions", control.regions),
            ("GET", "account", control.account),
            ("GET", "runner-auth/token", control.runner_token),
            ("GET", "tasks", control.tasks),
            ("POST", "tasks", control.keep_task),
            ("GET", "tasks/*", control.task),
            ("PUT", "tasks/*", control.keep_task),
            ("GET", "verifiers/check", self._verifying.check),
            ("POST", "verifiers/execute", self._verifying.execute),
            ("GET", "verifiers/*", self._verifying.source),
        ]
        table: dict[tuple[str, int], list[tuple[list[str], Handler]]] = {}
        for method, path, handler in routes:
            parts = path.split("/")
            table.setdefault((method, len(parts)), []).append((parts, handler))
        return table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] == "websocket":
            await self._openenv.websocket(scope, receive, send)
            return
        try:
            await self._http(scope, receive, send)
        except Refusal as e:
            await refuse(send, e)
        except InstanceGone as e:
            await refuse(send, Refusal(410, str(e)))
        except InstanceOver as e:
            await refuse(send, Refusal(410 if e.record.is_over else 409, str(e)))
        except PlatformError as e:
            await refuse(send, Refusal(400, str(e)))

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], Headers(scope["headers"])
        self._door.check_origin(headers)
        if (asked := _part_asked(path, headers)) is not None:
            await self._part(asked, headers, scope, receive, send)
        elif path.startswith("/i/"):
            instance_id, _, rest = path[3:].partition("/")
            if rest in MCP_PATHS:
                await self._mcp(instance_id, headers, scope, receive, send)
            else:
                await self._instance(instance_id, rest, headers, scope, receive, send)
        elif path.startswith("/v1/"):
            await self._control(path[4:].rstrip("/"), headers, scope, receive, send)
        elif path.startswith(OPENENV_PATH):
            await self._openenv.http(path.removeprefix(OPENENV_PATH), headers, scope, receive, send)
        elif path == "/healthz":
            await answer_json(send, {"status": "ok"})
        else:
            raise Refusal(400, f"there is nothing at {path[:100]!r}; see docs/platform.md")

    async def _mcp(self, instance_id: str, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":  # no streams, no sessions to end
            await answer(send, 405, mcp_refusal(b"", "POST messages here"), (b"allow", b"POST"))
            return
        body = await self._bodies_for(instance_id).read(scope, receive)
        try:
            with self.pool.use(instance_id) as instance:
                status, told = mcp_answer(instance.app, instance.call, headers, body)
        except (InstanceGone, InstanceOver) as e:
            status, told = 410, mcp_refusal(body, str(e))
        await answer(send, status, told)

    def _bodies_for(self, instance_id: str) -> BodyReader:
        """An id is what lets somebody in."""
        try:
            self.pool.record(instance_id)
        except InstanceGone:
            return self._strangers
        return self._bodies

    async def _instance(
        self, instance_id: str, rest: str, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        record = self.pool.record(instance_id)
        if not rest.startswith(RUNNER_PATH):
            if rest:
                raise Refusal(400, f"an instance has mcp and api/v1/env/, not {rest[:100]!r}")
            await answer_json(send, {"app": record.wanted.app, "status": record.state, "mcp": "mcp"})
            return
        self._door.check_runner(headers, record)
        if record.is_over:
            raise InstanceOver(record)
        body = await self._bodies.read(scope, receive)
        told = await self._runner.answer(instance_id, scope["method"], rest.removeprefix(RUNNER_PATH), body)
        await answer_json(send, told)

    async def _part(self, asked: PartAsked, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        self._door.check_runner(headers, self.pool.record(asked.instance_id))
        body = await self._bodies.read(scope, receive)
        await answer_json(
            send, self._runner.part_answer(asked.instance_id, asked.app, scope["method"], asked.rest, body)
        )

    async def _control(self, path: str, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        team = self._door.team(headers)
        handler, names = self._route(scope["method"], path)
        asked = Asked(
            team=team,
            base_url=self._public_url or f"{scope['scheme']}://{headers.get('host')}",
            query=parse_qs(scope["query_string"].decode("latin-1")),
            body=await self._bodies.read(scope, receive),
            request_id=(headers.get("x-request-id") or "")[:MAX_REQUEST_ID] or None,
            parts=names,
        )
        told = await handler(asked) if inspect.iscoroutinefunction(handler) else await asyncio.to_thread(handler, asked)
        await answer_json(send, told)

    def _route(self, method: str, path: str) -> tuple[Handler, tuple[str, ...]]:
        parts = path.split("/")
        for wanted, handler in self._routes.get((method, len(parts)), ()):
            if all(one in ("*", part) for one, part in zip(wanted, parts, strict=True)):
                return handler, tuple(part for one, part in zip(wanted, parts, strict=True) if one == "*")
        raise Refusal(400, f"the control plane here has no {method} {path[:100]!r}")

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        reaper = asyncio.create_task(self._reap(), name="platform-reaper")
        await send({"type": "lifespan.startup.complete"})
        await receive()
        reaper.cancel()
        self._openenv.close()
        with contextlib.suppress(asyncio.CancelledError):
            await reaper
        await send({"type": "lifespan.shutdown.complete"})

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.pool.tick()
            except Exception:
                log.exception("the reaper stumbled; it goes on")


def _part_asked(path: str, headers: Headers) -> PartAsked | None:
    """What the SDK's `env.app(name)` asks for: of the runner's address it keeps all before the path, or puts the app in
    the place of the instance. The login says which instance is meant."""
    found = PART.fullmatch(path)
    if found is None:
        return None
    is_instance, name, rest = found.groups()
    instance_id = login_of(headers).partition(":")[0]
    if is_instance and instance_id in ("", name):
        return None
    if not instance_id:
        raise Refusal(403, f"{path[:100]!r} is for a world's instance, whose address has a login (urls.manager.api)")
    return PartAsked(instance_id, name, rest)
