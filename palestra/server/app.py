"""The HTTP application: routes, errors in the format that clients expect, the limit on bodies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palestra import __version__
from palestra.server import engine_api, usage_api
from palestra.server.agentjet.routes import playing_router
from palestra.server.agentjet.trainer_routes import engine_router
from palestra.server.core.errors import Refusal, not_kept
from palestra.server.core.telemetry.metrics import CONTENT_TYPE, Metrics
from palestra.server.core.telemetry.readiness import Readiness
from palestra.server.core.wire_errors import WireError
from palestra.server.episodes import inspection_routes as looking_routes
from palestra.server.episodes import player_routes
from palestra.server.episodes import routes as episode_routes
from palestra.server.http.auth import Authenticator
from palestra.server.http.logs import RequestLog
from palestra.server.http.openapi import describe, refusals
from palestra.server.http.request_admission import RequestAdmission
from palestra.server.http.starting_page import starting_page
from palestra.server.model_api import alias_routes
from palestra.server.model_api.anthropic_messages import routes as anthropic_routes
from palestra.server.model_api.anthropic_messages.errors import envelope as anthropic_envelope
from palestra.server.model_api.errors import BROKE, envelope
from palestra.server.model_api.openai_chat import routes as openai_routes
from palestra.server.model_api.openai_responses import routes as responses_routes
from palestra.server.pages.mount import MOUNT, ServerPages
from palestra.server.services import ServerServices
from palestra.server.tinker import routes as tinker_routes
from palestra.server.tinker import routes_rest, routes_service
from palestra.server.tinker.schemas import ErrorResponse
from palestra.server.web_pages import add_pages
from palestra.store.errors import StoreError
from palestra.store.records import Rights
from palestra.types import episode_wire
from palestra.types.tinkerscript import ENGINE_ANSWERS, ENGINE_BODIES, PLAYING_RECORDS
from palestra.util.json_types import JsonPayload

log = structlog.get_logger()

DATA_ROUTES = frozenset(f"/api/v1/{name}" for name in ("forward_backward", "forward", "asample", "sample"))
BULK_ROUTES = frozenset(f"/api/v1/{name}" for name in ("asample", "sample", "retrieve_future", "retrieve_futures"))
OPEN_AT_START = ("/engine/", "/healthz")
MAX_OTHER_BYTES = 16 << 20  # limit for all other routes


class StartingGate:
    """Answers 503 while the server stands by or starts. Once `app` is there, the routes that engines need are open, and
    with `is_open` all of them."""

    def __init__(self, began: float) -> None:
        self.app: ASGIApp | None = None
        self.is_open = False
        self.standing_by: str | None = None
        """Why the server does not start yet, if it stands by."""
        self.engines: Callable[[], Mapping[str, str | None]] | None = None
        """Returns what each base model waits for, None for those that are ready; itself None until it is known which
        there are."""
        self._began = began

    def begin_start(self) -> None:
        """Ends the standing by, if there was one."""
        if self.standing_by is not None:
            self.standing_by, self._began = None, time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        if self.app is not None and (self.is_open or not is_http or scope["path"].startswith(OPEN_AT_START)):
            await self.app(scope, receive, send)
        elif is_http:
            await self._answer(scope["path"], Headers(scope=scope))(scope, receive, send)

    def _answer(self, path: str, headers: Headers) -> Response:
        starting_s = None if self.standing_by else round(time.monotonic() - self._began, 1)
        reason = self.standing_by or f"the server is starting, for {starting_s:.0f} s so far; ask again in a moment"
        match path:
            case "/healthz":
                return JSONResponse({"status": "ok"})
            case "/readyz":
                found = {"ready": False, "waiting_for": [], "reasons": [reason], "starting_s": starting_s}
                return JSONResponse(found, 503)
            case _ if path == "/" or "text/html" in headers.get("accept", ""):
                engines = None if self.engines is None else self.engines()
                page = starting_page(self.standing_by or "the server is starting", self._began, engines)
                return HTMLResponse(page, 503, {"retry-after": "1"})
            case _:
                return JSONResponse({"detail": reason}, 503, {"retry-after": "1"})


def create_app(services: ServerServices) -> RequestLog:
    limited = BodyMiddleware(_routed(services), services.authenticator, services.config.limits.max_body_bytes)
    return RequestLog(RequestAdmission(limited, BULK_ROUTES), observe=services.metrics.request)


def _routed(services: ServerServices) -> FastAPI:
    app = FastAPI(
        title="Palestra",
        version=__version__,
        summary="A Tinker-compatible training engine",
        docs_url=None,
        redoc_url=None,
        responses=refusals(ErrorResponse),
        # we have our own; asking for these costs time in each request
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    # What routes ask for, each for its own: `request.app.state` is how FastAPI hands it to them.
    app.state.config, app.state.max_body_bytes = services.config, services.config.limits.max_body_bytes
    app.state.authenticator = services.authenticator
    app.state.tinker, app.state.model_api, app.state.episodes = services.tinker, services.model_api, services.episodes
    app.state.trainer, app.state.engine_api = services.agentjet_trainer, services.engine_api
    app.state.owners, app.state.usage = services.owners, services.usage
    app.state.metrics, app.state.readiness = services.metrics, services.readiness
    app.include_router(routes_service.router)
    for router in (tinker_routes.training, tinker_routes.sampling, tinker_routes.results):
        app.include_router(router)
    for routes in (routes_rest, episode_routes, player_routes, looking_routes, engine_api, usage_api):
        app.include_router(routes.router)
    app.include_router(playing_router)
    app.include_router(engine_router)
    for number, prefix in enumerate(openai_routes.PREFIXES):
        app.include_router(openai_routes.router, prefix=prefix, include_in_schema=number == 0)
        app.include_router(alias_routes.router, prefix=prefix, include_in_schema=number == 0)
        app.include_router(responses_routes.router, prefix=prefix, include_in_schema=number == 0)
    for number, prefix in enumerate(anthropic_routes.PREFIXES):
        app.include_router(anthropic_routes.router, prefix=prefix, include_in_schema=number == 0)
    for number, prefix in enumerate(("", *openai_routes.PREFIXES)):
        app.include_router(openai_routes.tokens, prefix=prefix, include_in_schema=number == 0)
    describe(app, episode_wire.BODIES, episode_wire.ANSWERS)
    describe(
        app, (), (usage_api.UsageAnswer, usage_api.QuotasAnswer, *PLAYING_RECORDS, *ENGINE_BODIES, *ENGINE_ANSWERS)
    )
    add_pages(app)
    app.add_api_route(MOUNT, _to_pages, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount(MOUNT, ServerPages(services.pages))
    app.add_api_route("/healthz", _healthz, tags=["operations"])
    app.add_api_route("/readyz", _readyz, tags=["operations"])
    app.add_api_route("/metrics", _metrics, tags=["operations"], response_class=Response)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(StoreError, _not_kept)
    app.add_exception_handler(WireError, _malformed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(ClientDisconnect, _left)
    app.add_exception_handler(Exception, _broken)
    return app


async def _to_pages() -> Response:
    """A relative address: there may be a path before it that only a proxy knows."""
    return RedirectResponse(f".{MOUNT}/")


async def _healthz() -> dict[str, str]:
    """Whether the server answers."""
    return {"status": "ok"}


async def _readyz(request: Request) -> Response:
    """200 if every engine is up, the database answers and the disks are writable; else 503 with the reasons."""
    readiness: Readiness = request.app.state.readiness
    now = await readiness.read()
    response = {"ready": not now.reasons, "waiting_for": now.waiting_for, "reasons": now.reasons}
    return JSONResponse(response, status_code=503 if now.reasons else 200)


async def _metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format. They contain all owners, so a trainer's key is not enough."""
    await request.app.state.authenticator.admit(request, rights=(Rights.ADMIN, Rights.METRICS))
    metrics: Metrics = request.app.state.metrics
    return Response(metrics.render(), media_type=CONTENT_TYPE)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    headers = {} if error.retry_after_s is None else {"retry-after": f"{error.retry_after_s:g}"}
    return JSONResponse({"detail": error.detail}, status_code=error.status, headers=headers)


async def _not_kept(request: Request, error: Exception) -> Response:
    assert isinstance(error, StoreError)
    return await _refused(request, not_kept(error))


async def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, WireError)
    return JSONResponse({"detail": str(error)}, status_code=error.status)


async def _invalid(request: Request, error: Exception) -> Response:
    """Answers 400, not FastAPI's 422: one permanent status for every malformed request."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return JSONResponse({"detail": f"{where}: {first['msg']}" if where else str(first["msg"])}, status_code=400)


def _error_response(path: str, status: int, detail: str) -> JsonPayload:
    """Returns an error that no route has made, in the format of the API that the path belongs to."""
    if path.startswith(anthropic_routes.PATHS):
        return anthropic_envelope(status, detail)
    return envelope(status, detail) if path.startswith(openai_routes.PREFIXES) else {"detail": detail}


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = _error_response(request.url.path, error.status_code, str(error.detail))
    return JSONResponse(response, status_code=error.status_code, headers=error.headers)


async def _left(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": "the request ended before its body did"}, status_code=400)


async def _broken(request: Request, error: Exception) -> Response:
    log.error("a request failed unexpectedly", path=request.url.path, exc_info=error)
    return JSONResponse({"detail": BROKE}, status_code=500)


class BodyMiddleware:
    """Reads a body only for callers with a key of any kind (FastAPI reads it before a route checks the key), and stops
    where it is too long, whatever its headers say."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator, max_bytes: int):
        self.app, self.authenticator, self.max_bytes = app, authenticator, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_checked = scope["type"] == "http" and not scope["path"].startswith(f"{MOUNT}/")  # pages limit their own
        headers = Headers(scope=scope) if is_checked else {}
        # without these headers there is no body
        if "content-length" not in headers and "transfer-encoding" not in headers:
            await self.app(scope, receive, send)
            return
        limit = self.max_bytes if scope["path"] in DATA_ROUTES else min(self.max_bytes, MAX_OTHER_BYTES)
        too_long = HTTPException(413, f"the request is longer than {limit} bytes")
        if int(headers.get("content-length", "0")) > limit:
            response = _error_response(scope["path"], 413, too_long.detail)
            await JSONResponse(response, status_code=413)(scope, receive, send)
            return
        is_admitted, seen = False, 0

        async def checked() -> Message:
            nonlocal is_admitted, seen
            if not is_admitted:
                await self._admit(scope)
                is_admitted = True
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                raise too_long
            return message

        await self.app(scope, checked, send)

    async def _admit(self, scope: Scope) -> None:
        try:
            await self.authenticator.admit(HTTPConnection(scope), rights=tuple(Rights))
        except Refusal as error:  # raised through FastAPI, which lets this exception pass while it reads
            raise HTTPException(error.status, error.detail) from None
