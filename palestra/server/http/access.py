"""The caller as a parameter of routes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from palestra.config.serve import ServeConfig
from palestra.server.core.owners.callers import TRAINERS, Caller
from palestra.server.http.auth import Authenticator


async def _caller(request: Request) -> Caller:
    authenticator: Authenticator = request.app.state.authenticator
    return await authenticator.admit(request)


async def _model_caller(request: Request) -> Caller:
    authenticator: Authenticator = request.app.state.authenticator
    return await authenticator.admit_player(request, rights=TRAINERS)


CallerNow = Annotated[Caller, Depends(_caller)]
ModelCallerNow = Annotated[Caller, Depends(_model_caller)]
"""A caller that may also be an attempt at an episode: for routes that only show models, or sample."""


def public_url(request: Request) -> str:
    """Returns the address by which clients reach this server: the one that was set, else that of this request."""
    config: ServeConfig = request.app.state.config
    return config.public_url or str(request.base_url).rstrip("/")
