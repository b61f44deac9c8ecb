"""The dashboard as a part of the server: the pages of run folders with the server's own, mounted below `/ui`."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from fastapi.staticfiles import StaticFiles

from palestra.server.core.errors import Refusal, not_kept
from palestra.server.core.owners.callers import TRAINERS, Caller
from palestra.server.core.wire_errors import WireError
from palestra.server.model_api.openai_chat import routes as openai_routes
from palestra.server.pages import (
    episode_routes,
    key_routes,
    owner_routes,
    playground_routes,
    replay_routes,
    server_routes,
)
from palestra.server.pages.access import CALLER, AdminNow, ServerAccess, TrainerNow
from palestra.server.pages.parts import PageParts
from palestra.store.errors import StoreError
from palestra.store.records import Rights
from palestra.view.access import own_path
from palestra.view.api import get_catalogue
from palestra.view.app import Extension, PageContext, create_app, show_error
from palestra.view.navigation import mark_here
from palestra.view.runs.catalogue import Catalogue
from palestra.view.tasks.platform_routes import get_player

FOLDER = Path(__file__).parent
ALL_RIGHTS, ADMINS = (*TRAINERS, Rights.METRICS), (Rights.ADMIN,)
LINKS = (
    ("Runs", "", ADMINS),
    ("Sweeps", "sweeps", ADMINS),
    ("Server", "server", ALL_RIGHTS),
    ("Episodes", "episodes", TRAINERS),
    ("Playground", "playground", TRAINERS),
    ("Platform", "platform", TRAINERS),
    ("Gym", "gym", ADMINS),
    ("Owners", "owners", ALL_RIGHTS),
    ("Keys", "keys", ADMINS),
)
"""Title, path, and the rights with which a link is shown: those that open its page."""


def create_pages(parts: PageParts) -> FastAPI:
    access = ServerAccess(parts.authenticator, parts.store, parts.secret)

    def add(app: FastAPI) -> None:
        app.state.server, app.state.activity = parts.server, parts.activity
        app.state.owners, app.state.quotas, app.state.usage = parts.owners, parts.quotas, parts.usage
        app.state.episodes, app.state.model_api, app.state.replays = parts.episodes, parts.model_api, parts.replays
        app.state.store, app.state.key_uses = parts.store, parts.key_uses
        app.state.is_stopping = lambda: parts.shutdown.has_begun
        app.state.authenticator, app.state.max_body_bytes = access, access.max_body_bytes
        app.dependency_overrides[get_catalogue] = _runs
        app.dependency_overrides[get_player] = _player
        for routes in (server_routes, episode_routes, playground_routes, owner_routes, key_routes):
            app.include_router(routes.api)
            app.include_router(routes.pages)
        app.include_router(replay_routes.pages)
        app.include_router(openai_routes.router, prefix="/v1", include_in_schema=False)
        app.mount("/static/server", StaticFiles(directory=FOLDER / "static"))
        app.add_exception_handler(Refusal, _refused)
        app.add_exception_handler(StoreError, _refused)
        app.add_exception_handler(WireError, _refused)

    extension = Extension(add, FOLDER / "templates", _context)
    return create_app(Catalogue(parts.runs), access, extension, parts.gym)


def _runs(request: Request, caller: AdminNow) -> Catalogue:
    """The server's folder of runs, which have no owner: an admin sees them all, others see none."""
    return request.app.state.catalogue


def _player(caller: TrainerNow) -> str:
    """Plays of tasks belong to owners, as episodes do."""
    return caller.owner


def _context(request: Request) -> PageContext:
    caller: Caller | None = request.scope.get(CALLER)
    theirs = [(title, path) for title, path, rights in LINKS if caller is not None and caller.right in rights]
    links = mark_here(request, theirs)
    return {
        "nav_links": links,
        "has_server": True,
        "user": caller.key.name if caller is not None and caller.key is not None else "",
    }


async def _refused(request: Request, error: Exception) -> Response:
    match error:
        case StoreError():
            refusal = not_kept(error)
        case WireError():
            refusal = Refusal(error.status, str(error))
        case _:
            assert isinstance(error, Refusal)
            refusal = error
    if own_path(request.scope) == "/" and refusal.status == 403:
        return RedirectResponse("./server", status_code=303)
    code = getattr(refusal, "code", None) or {403: "forbidden", 404: "not_found"}.get(refusal.status, "refused")
    return show_error(request, refusal.status, code, refusal.detail)
