"""One app as an OpenEnv server of its own: what the `server/app.py` of an OpenEnv package serves.

Owns: an app at the root of the paths, its pool, who may come in. Never touches: what the paths mean. OpenEnv's servers
are open to whoever reaches them; PALESTRA_PLATFORM_KEYS (separated by spaces) closes this one but for those keys.
"""

from __future__ import annotations

import os
import secrets

from palestra.environments.platform.catalog import app_of
from palestra.environments.platform.faces.app import OPENENV_PATH, PlatformApp
from palestra.environments.platform.faces.door import LOCAL_TEAM, Door
from palestra.environments.platform.faces.http import Headers, Receive, Refusal, Scope, Send, refuse
from palestra.environments.platform.pool import Pool

KEYS = "PALESTRA_PLATFORM_KEYS"


class OpenDoor(Door):
    """For any client under any name. Behind it are fresh worlds and their tools; no runner, no other's instances."""

    def __init__(self) -> None:
        super().__init__(secret=secrets.token_bytes())

    def team(self, headers: Headers) -> str:
        return LOCAL_TEAM

    def check_origin(self, headers: Headers) -> None:
        """Containers have names that nobody here knows."""


class AppAlone:
    def __init__(self, app: str) -> None:
        """Raises PlatformError."""
        self._root = f"{OPENENV_PATH}{app_of(app).key}"
        keys = os.environ.get(KEYS, "").split()
        self._pool = Pool()
        door = Door(keys, secret=secrets.token_bytes(), is_loopback=False) if keys else OpenDoor()
        self._platform = PlatformApp(self._pool, door)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._platform(scope, receive, send)
            self._pool.shut_down()
            return
        if scope["type"] == "http" and scope["path"] == "/":
            await refuse(send, Refusal(404, "an OpenEnv server: see /metadata and /schema"))
            return
        await self._platform({**scope, "path": self._root + scope["path"]}, receive, send)
