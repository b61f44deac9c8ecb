"""Access to episodes: who may do what, and under which name a player holds its leases."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends, Request

from palestra.config.serve import ServeConfig
from palestra.server.broker.service import EpisodeService
from palestra.server.core.errors import Refusal
from palestra.server.core.owners.callers import TRAINERS, Caller
from palestra.server.http.access import public_url
from palestra.server.http.auth import Authenticator
from palestra.store.records import Rights
from palestra.types.episodes import EndRequest, LeaseRef

PLAYERS = (*TRAINERS, Rights.WORKER)
MAX_ID = 128


async def _episodes(request: Request) -> EpisodeService:
    return request.app.state.episodes


async def _trainer(request: Request) -> Caller:
    return await _authenticator(request).admit(request)


async def _claimant(request: Request) -> Caller:
    return await _authenticator(request).admit(request, rights=PLAYERS)


async def _player(request: Request) -> Caller:
    return await _authenticator(request).admit_player(request, rights=PLAYERS)


def _authenticator(request: Request) -> Authenticator:
    return request.app.state.authenticator


EpisodesNow = Annotated[EpisodeService, Depends(_episodes)]
Trainer = Annotated[Caller, Depends(_trainer)]
Claimant = Annotated[Caller, Depends(_claimant)]
Player = Annotated[Caller, Depends(_player)]
"""A player; also the key of an attempt, for that attempt."""


def holder(caller: Caller, client_id: str) -> str:
    """Returns the holder of the leases. Clients of the same name with different keys are different holders."""
    if not client_id:
        raise Refusal(400, "client_id is missing; send any name that no other player with this key uses")
    if caller.key is None:
        return client_id
    name = f"{caller.key.key_id}:{client_id}"
    return name if len(name) <= MAX_ID else f"{caller.key.key_id}:{hashlib.sha256(client_id.encode()).hexdigest()}"


def speaker(caller: Caller, client_id: str, about: Sequence[LeaseRef | EndRequest]) -> str | None:
    """Returns the holder who makes a call about these leases; None: the attempt itself."""
    attempt = caller.attempt
    if attempt is None:
        return holder(caller, client_id)
    if any((one.episode_id, one.attempt) != (attempt.episode_id, attempt.attempt) for one in about):
        detail = f"this key is only for episode {attempt.episode_id}, attempt {attempt.attempt}"
        raise Refusal(403, detail)
    return None


def endpoint(request: Request) -> tuple[str, str]:
    """Returns the address at which a player reaches the model, and the name of a model."""
    config: ServeConfig = request.app.state.config
    return f"{config.episodes.url or public_url(request)}/v1", config.models[0].name[0]
