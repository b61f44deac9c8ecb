"""Where the dashboard is mounted, and what it takes; it is imported and made at the first request.

Owns: its path and its beginning. Never touches: what it shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from palestra.server.broker.service import EpisodeService
from palestra.server.core.owners.owner_states import OwnerStates
from palestra.server.core.owners.quotas import OwnerQuotas
from palestra.server.core.owners.usage import UsageAccount
from palestra.server.core.shutdown import Shutdown
from palestra.server.core.task_replays import TaskReplays
from palestra.server.core.telemetry.activity import Activity
from palestra.server.http.auth import Authenticator
from palestra.server.model_api.service import ModelApi
from palestra.server.pages.server_state import ServerReader
from palestra.store import Store

MOUNT = "/ui"


@dataclass(frozen=True, slots=True)
class PageParts:
    runs: Path
    """The server's folder of runs."""
    gym: str
    secret: str
    store: Store
    authenticator: Authenticator
    key_uses: dict[int, float]
    model_api: ModelApi
    episodes: EpisodeService
    replays: TaskReplays
    server: ServerReader
    activity: Activity
    owners: OwnerStates
    quotas: OwnerQuotas
    usage: UsageAccount
    shutdown: Shutdown


class ServerPages:
    """Most servers are never looked at, and modules and templates of the pages take their time."""

    def __init__(self, parts: PageParts):
        self._parts = parts
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            from palestra.server.pages.app import create_pages

            self._app = create_pages(self._parts)
        await self._app(scope, receive, send)
