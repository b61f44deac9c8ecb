"""What every route needs: who is calling, and the service."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from palestra.server.auth import Caller, Doorkeeper
from palestra.server.tinker.service import TinkerService


async def _caller(request: Request) -> Caller:
    doorkeeper: Doorkeeper = request.app.state.doorkeeper
    return await doorkeeper.admit(request)


async def _service(request: Request) -> TinkerService:
    """Async: a plain function would cost a trip through the thread pool."""
    return request.app.state.tinker


CallerNow = Annotated[Caller, Depends(_caller)]
ServiceNow = Annotated[TinkerService, Depends(_service)]
