"""The player's side of the episode API over HTTP, for FastAPI: it describes these calls, and answers those that
`direct.py` does not."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from palestra.server.episodes import calls
from palestra.server.episodes import wire as w
from palestra.server.episodes.access import Claimant, Player
from palestra.server.episodes.bodies import read_record
from palestra.server.episodes.routes import PREFIX, answered
from palestra.server.openapi import answer_of, body_of
from palestra.types.episodes import ClaimRequest

router = APIRouter(prefix=PREFIX, tags=["episodes"])


@router.post("/claim", openapi_extra=body_of(ClaimRequest), responses=answer_of(w.Claimed))
async def claim(request: Request, caller: Claimant) -> Response:
    """Waits for something to play, up to `wait_s`. Who leaves meanwhile has claimed nothing."""
    asked = await read_record(request, ClaimRequest)
    return await answered(request, caller, lambda asking: calls.claim(asking, asked))


@router.post("/heartbeat", openapi_extra=body_of(w.Heartbeat), responses=answer_of(w.Beats))
async def heartbeat(request: Request, caller: Player) -> Response:
    """Keeps leases, and tells which are lost, and why."""
    body = await read_record(request, w.Heartbeat)
    return await answered(request, caller, lambda asking: calls.heartbeat(asking, body))


@router.post("/end", openapi_extra=body_of(w.Ends), responses=answer_of(w.EndedEpisodes))
async def end(request: Request, caller: Player) -> Response:
    """Results; each is answered for itself. What is accepted is on disk, and may be sent again."""
    body = await read_record(request, w.Ends)
    return await answered(request, caller, lambda asking: calls.end(asking, body))


@router.post("/release", openapi_extra=body_of(w.Release), responses=answer_of(w.Beats))
async def release(request: Request, caller: Player) -> Response:
    """Gives leases back, without a result: somebody else may play."""
    body = await read_record(request, w.Release)
    return await answered(request, caller, lambda asking: calls.release(asking, body))
