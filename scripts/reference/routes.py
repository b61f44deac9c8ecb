"""The reference of every HTTP route: the server's from its OpenAPI description, the platform's and the gym's from
their route tables.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute

from palestra.config.serve import ServeConfig
from palestra.environments.platform.api.app import PlatformApp
from palestra.environments.platform.api.auth import PlatformAuth
from palestra.environments.platform.pool import InstancePool
from palestra.gym.head import head_app
from palestra.gym.http_app import HEALTH
from palestra.gym.models.base import ModelServer
from palestra.gym.records import GymConfig
from palestra.gym.servers.agents import AgentServer
from palestra.gym.servers.base import GymServer
from palestra.gym.servers.gymnasium import GymnasiumServer
from palestra.gym.servers.resources import ResourcesServer
from palestra.gym.testing import opened
from palestra.server.app import create_app
from palestra.server.pages.app import create_pages
from palestra.server.services import ServerServices
from palestra.store import Store
from palestra.types.gym_calls import STATS
from palestra.view.app import create_app as create_view
from palestra.view.runs.catalogue import Catalogue
from scripts.reference.pages import Reference, code, page, table
from scripts.reference.route_sentences import GYM_HEAD, GYM_SERVERS, PLATFORM

HEAD = ["route", "what it does"]
INTRO = """Made from the code. A server shows the same at `/docs`, with every field of every body, and as JSON at
`/openapi.json`. Who may call what is in [Serving](../serving.md#who-may-do-what)."""

TAGS = {
    "service": "Tinker: sessions",
    "training": "Tinker: training",
    "sampling": "Tinker: sampling",
    "futures": "Tinker: results",
    "rest": "Tinker: runs, checkpoints, keys",
    "model endpoint": "The model endpoint",
    "episodes": "Episodes",
    "tinkerscript": "AgentJet's routes",
    "operations": "Operations",
}


def pages(reference: Reference) -> None:
    api, ui = asyncio.run(_server_apis())
    view = create_view(Catalogue(Path())).openapi()
    parts = [
        *_server(api, reference),
        "## The dashboard",
        "`palestra view`; see [Look at runs in the browser](../dashboard.md#the-json-api).",
        _dashboard(view["paths"], reference),
        "## The dashboard of a server",
        "Below `/ui` of `palestra serve`, beside those above; see [The dashboard](../dashboard.md#pages-of-a-server).",
        _dashboard({path: found for path, found in ui["paths"].items() if path not in view["paths"]}, reference),
        "## The platform",
        "`palestra platform serve`; see [The platform](../platform.md#who-may-ask-for-what) for who may call what.",
        _listed(_platform(), PLATFORM, "platform", reference),
        "## The head of a gym",
        "`palestra gym run`, at port 11000; see [A gym](../gym.md#the-head).",
        _listed(_head(), GYM_HEAD, "gym's head", reference),
        "## The servers of a gym",
        "Each server of a gym listens on a port of its own, and answers the routes of its kind.",
        _listed(_gym_servers(), GYM_SERVERS, "gym server", reference),
    ]
    reference.pages["reference/routes.md"] = page("HTTP routes", INTRO, parts)


async def _server_apis() -> tuple[dict[str, Any], dict[str, Any]]:
    """The APIs of a server without models, on an empty state folder, and of its pages."""
    with tempfile.TemporaryDirectory() as folder:
        config = ServeConfig(state=Path(folder))
        async with ServerServices.open(config, Store.open(config.database)) as services:
            app: Any = create_app(services)
            while not isinstance(app, FastAPI):
                app = app.app
            return app.openapi(), create_pages(services.pages).openapi()


def _server(api: dict[str, Any], reference: Reference) -> Iterator[str]:
    rows: dict[str, list[list[str]]] = {tag: [] for tag in TAGS}
    for path, methods in api["paths"].items():
        for method, about in methods.items():
            route = f"{method.upper()} {path}"
            text = reference.explained(
                about.get("description"), f"the route `{route}`", "the docstring of its function"
            )
            (tag,) = about.get("tags") or ["operations"]
            text = reference.public("route", route, "", text)
            rows.setdefault(tag, []).append([code(route), text])
    for tag, found in rows.items():
        if found:
            yield f"## {TAGS.get(tag, tag)}"
            yield table(HEAD, found)


def _dashboard(paths: dict[str, dict[str, Any]], reference: Reference) -> str:
    rows = []
    for path, methods in paths.items():
        for method, about in methods.items():
            route = f"{method.upper()} {path}"
            text = reference.explained(
                about.get("description"), f"the route `{route}`", "the docstring of its function"
            )
            rows.append([code(route), reference.public("route", f"dashboard: {route}", "", text)])
    return table(HEAD, rows)


def _listed(routes: Sequence[str], sentences: dict[str, str], what: str, reference: Reference) -> str:
    """A table of routes whose functions are made, and have no docstring of their own."""
    where = "scripts/reference/route_sentences.py"
    texts = {one: reference.explained(sentences.get(one), f"the {what}'s `{one}`", where) for one in routes}
    rows = [[code(one), reference.public("route", f"{what}: {one}", "", text)] for one, text in texts.items()]
    reference.problems += [f"the {what} has no `{one}`; take it out of {where}" for one in sentences.keys() - {*routes}]
    return table(HEAD, rows)


def _platform() -> list[str]:
    with InstancePool() as pool:
        return list(_walk(PlatformApp(pool, PlatformAuth(secret=b"-")).routes, ""))


def _head() -> list[str]:
    config = GymConfig(servers={}, settings={}, head_host="", head_port=0, secret="")
    return list(_walk(head_app(config, None, list, bool).routes, ""))


def _gym_servers() -> list[str]:
    health = [f"GET {path}" for path in sorted(HEALTH)]
    resources = _posts(ResourcesServer, expose_tools_over_mcp=True) | {"/{tool}"}
    paths = _posts(AgentServer) | _posts(ModelServer) | _posts(GymnasiumServer) | resources
    return [*health, "GET /openapi.json", f"GET {STATS}", *(f"POST {path}" for path in sorted(paths))]


def _posts(kind: type[GymServer], **settings: Any) -> set[str]:
    class Bare(kind):  # a kind alone has no routes yet
        pass

    with opened(Bare, **settings) as found:
        return set(found.server.routes())


def _walk(routes: Sequence[BaseRoute], prefix: str) -> Iterator[str]:
    for route in routes:
        if isinstance(route, Mount):
            yield from _walk(route.routes, prefix + route.path)
        elif isinstance(route, WebSocketRoute):
            yield f"WebSocket {prefix}{route.path}"
        elif isinstance(route, Route) and not route.path.endswith("{path:path}"):
            methods = sorted((route.methods or set()) - {"HEAD"})
            # Routes that look at the method themselves answer POST, and say so to others.
            yield f"{methods[0] if len(methods) == 1 else 'POST'} {prefix}{route.path}"
