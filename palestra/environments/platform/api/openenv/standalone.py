"""One app as an OpenEnv server of its own: what the `server/app.py` of an OpenEnv package serves.

OpenEnv's servers are open to every client that reaches them; PALESTRA_PLATFORM_KEYS (separated by spaces) restricts
this one to those keys.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from palestra.environments.platform.api.app import reaping
from palestra.environments.platform.api.auth import LOCAL_TEAM, PlatformAuth, PlatformRefusal
from palestra.environments.platform.api.http import REFUSALS, EntranceMiddleware, PlatformBodies
from palestra.environments.platform.api.openenv.routes import OpenEnvRoutes
from palestra.environments.platform.catalog import app_of
from palestra.environments.platform.pool import InstancePool

KEYS = "PALESTRA_PLATFORM_KEYS"


class NoAuth(PlatformAuth):
    """Accepts any client under any name. It gives access to new worlds and their tools only; not to a runner, nor to
    instances of other clients."""

    def __init__(self) -> None:
        super().__init__(secret=secrets.token_bytes())

    def team(self, headers: Headers) -> str:
        return LOCAL_TEAM

    def check_origin(self, headers: Headers) -> None:
        """Containers have host names that are not known here."""


class StandaloneApp(Starlette):
    def __init__(self, app: str) -> None:
        """Raises PlatformError."""
        keys = os.environ.get(KEYS, "").split()
        auth = PlatformAuth(keys, secret=secrets.token_bytes(), is_loopback=False) if keys else NoAuth()
        self._pool = InstancePool()
        self._openenv = OpenEnvRoutes(self._pool, auth, PlatformBodies(), app_of(app))
        super().__init__(
            routes=[*self._openenv.routes(), Route("/", _root)],
            middleware=[Middleware(EntranceMiddleware, auth=auth)],
            exception_handlers=REFUSALS,
            lifespan=self._live,
        )

    @asynccontextmanager
    async def _live(self, _: Starlette) -> AsyncIterator[None]:
        async with reaping(self._pool):
            yield
            self._openenv.close()
        self._pool.shut_down()


async def _root(_: Request) -> Response:
    raise PlatformRefusal(404, "an OpenEnv server: see /metadata and /schema")
