"""The service, as a parameter of routes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from palestra.server.tinker.service import TinkerService


async def _service(request: Request) -> TinkerService:
    """Async, because a plain function would cost a trip through the thread pool."""
    return request.app.state.tinker


ServiceNow = Annotated[TinkerService, Depends(_service)]
