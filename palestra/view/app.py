"""The dashboard as an application: routes, errors as pages or as JSON, who may look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from palestra import __version__
from palestra.environments.platform import PlatformError
from palestra.runs.record_files import RunError
from palestra.runs.rollout_filter import WhereError
from palestra.types.gym import GYM_HEAD
from palestra.view import api, gym_routes, login, pages
from palestra.view.access import API_PATHS, HEADERS, Access, AccessMiddleware, PageAccess, error_response, own_path
from palestra.view.navigation import LINKS, mark_here
from palestra.view.rendering import FOLDER, page_templates, render
from palestra.view.rollouts import rollout_pages
from palestra.view.runs.catalogue import Catalogue
from palestra.view.runs.comparison import ComparisonError
from palestra.view.sweeps import sweep_routes
from palestra.view.tasks import platform_routes
from palestra.view.tasks.task_plays import TaskPlays

PageContext = dict[str, object]


def no_server(request: Request) -> PageContext:
    """Returns what every template knows: links to the pages, whether a server is behind them, and who is logged in."""
    return {"nav_links": mark_here(request, LINKS), "has_server": False, "user": ""}


@dataclass(frozen=True, slots=True)
class Extension:
    """What a server adds to the pages of run folders."""

    add: Callable[[FastAPI], None]
    """Adds routes, files and errors, before the dashboard's own."""
    templates: Path
    context: Callable[[Request], PageContext]
    """Takes the place of `no_server`."""


def create_app(
    catalogue: Catalogue,
    access: PageAccess | None = None,
    extension: Extension | None = None,
    gym: str = GYM_HEAD,
) -> FastAPI:
    """`gym` is the address of the head server of the gym that is shown."""
    app = FastAPI(
        title="Palestra's dashboard",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/v1/openapi.json",
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.catalogue, app.state.access = catalogue, access or Access()
    app.state.is_stopping = lambda: False
    app.state.context = extension.context if extension else no_server
    app.state.templates = page_templates(*([extension.templates] if extension else []))
    if extension:
        extension.add(app)
    app.state.plays, app.state.gym = TaskPlays(), gym
    for routes in (platform_routes, gym_routes, sweep_routes):
        app.include_router(routes.api)
        app.include_router(routes.pages)
    for routes in (api, pages, rollout_pages, login):
        app.include_router(routes.router)
    app.mount("/static", StaticFiles(directory=FOLDER / "static"), name="static")
    for kind in (
        RunError,
        WhereError,
        ComparisonError,
        PlatformError,
        msgspec.DecodeError,
        HTTPException,
        RequestValidationError,
        OSError,
    ):
        app.add_exception_handler(kind, _failed)
    app.add_exception_handler(Exception, _crashed)
    app.add_middleware(AccessMiddleware, access=app.state.access)
    return app


async def _failed(request: Request, error: Exception) -> Response:
    return show_error(request, *_described(error))


async def _crashed(request: Request, _error: Exception) -> Response:
    """Answers unexpected errors. It is sent outside of the middleware, which sets the headers of all others, and
    then raised again for the log."""
    response = show_error(request, 500, "internal", "this is a bug of the dashboard; the log of its server says more")
    response.headers.update(HEADERS)
    return response


def show_error(request: Request, status: int, code: str, message: str) -> Response:
    if own_path(request.scope).startswith(API_PATHS):
        return error_response(status, code, message)
    return render(request, "error.html", status, code=status, message=message)


def _described(error: Exception) -> tuple[int, str, str]:
    match error:
        case HTTPException():
            return error.status_code, "http", str(error.detail)
        case RequestValidationError():
            first = error.errors()[0]
            return 400, "bad_request", f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}"
        case LookupError():
            return 404, "not_found", str(error)
        case ValueError() | PlatformError():
            return 400, "bad_request", str(error)
    return 422, "unreadable", str(error)
