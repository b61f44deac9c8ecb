"""Mounts the dashboard, which is imported and made at the first request."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from palestra.server.pages.parts import PageParts

MOUNT = "/ui"


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
