"""The dashboard as an application: routes, errors as pages or as JSON, who may look.

Owns: how they are combined. Never touches: what a route does.
"""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from palestra import __version__
from palestra.runs.record_files import RunError
from palestra.runs.rollout_filter import WhereError
from palestra.view import api, login, pages
from palestra.view.access import Access, AccessMiddleware, error_response, own_path
from palestra.view.catalogue import Catalogue
from palestra.view.rendering import FOLDER, render


def create_app(catalogue: Catalogue, access: Access | None = None) -> FastAPI:
    app = FastAPI(
        title="Palestra's dashboard",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/v1/openapi.json",
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.catalogue, app.state.access = catalogue, access or Access()
    for routes in (api, pages, login):
        app.include_router(routes.router)
    app.mount("/static", StaticFiles(directory=FOLDER / "static"), name="static")
    for kind in (RunError, WhereError, msgspec.DecodeError, HTTPException, RequestValidationError, OSError):
        app.add_exception_handler(kind, _failed)
    app.add_middleware(AccessMiddleware, access=app.state.access)
    return app


async def _failed(request: Request, error: Exception) -> Response:
    status, code, message = _described(error)
    if own_path(request.scope).startswith("/api/"):
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
        case ValueError():
            return 400, "bad_request", str(error)
    return 422, "unreadable", str(error)
