"""What every route needs: who is calling, and the service."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from palestra.server.http.auth import TRAINERS, Caller, Doorkeeper
from palestra.server.tinker.service import TinkerService


async def _caller(request: Request) -> Caller:
    doorkeeper: Doorkeeper = request.app.state.doorkeeper
    return await doorkeeper.admit(request)


async def _service(request: Request) -> TinkerService:
    """Async: a plain function would cost a trip through the thread pool."""
    return request.app.state.tinker


async def _model_caller(request: Request) -> Caller:
    doorkeeper: Doorkeeper = request.app.state.doorkeeper
    return await doorkeeper.admit_player(request, rights=TRAINERS)


CallerNow = Annotated[Caller, Depends(_caller)]
ModelCallerNow = Annotated[Caller, Depends(_model_caller)]
"""Also an attempt to play an episode: for routes that only look at models, or sample."""
ServiceNow = Annotated[TinkerService, Depends(_service)]
