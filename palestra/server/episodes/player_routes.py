"""The player's side of the episode API over HTTP. Thin: what the calls mean is in `palestra.episodes.board`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response
from msgspec.structs import replace

from palestra.server.broker.claims import Claim
from palestra.server.core.errors import Refusal
from palestra.server.episodes.routes import PREFIX
from palestra.server.http.connection import while_connected
from palestra.server.http.episode_access import Claimant, EpisodesNow, Player, endpoint, holder, speaker
from palestra.server.http.json_records import json_response, read_record
from palestra.server.http.openapi import answer_of, body_of
from palestra.types import episode_wire as w
from palestra.types.episodes import ClaimRequest

MAX_AT_ONCE = 4096  # leases in one call
ASK_AGAIN_S = 1.0

router = APIRouter(prefix=PREFIX, tags=["episodes"])


@router.post("/claim", openapi_extra=body_of(ClaimRequest), responses=answer_of(w.Claimed))
async def claim(request: Request, episodes: EpisodesNow, caller: Claimant) -> Response:
    """Claim episodes to play. Waits for them up to `wait_s`; a client that disconnects meanwhile has claimed
    nothing."""
    body = await read_record(request, ClaimRequest)
    if not body.wait_s >= 0:
        raise Refusal(400, f"wait_s: 0 seconds or more, found {body.wait_s}")
    body = replace(body, client_id=holder(caller, body.client_id))
    base_url, model = endpoint(request)
    waiting_claim = Claim(caller.owner, body, base_url=base_url, model=model)
    leases = await episodes.claims.claim(waiting_claim, partial(while_connected, request))
    if leases:
        return json_response(w.Claimed(leases, 0.0))
    return json_response(w.Claimed([], ASK_AGAIN_S, episodes.claims.why_nothing(waiting_claim)))


@router.post("/heartbeat", openapi_extra=body_of(w.HeartbeatRequest), responses=answer_of(w.HeartbeatAnswers))
async def heartbeat(request: Request, episodes: EpisodesNow, caller: Player) -> Response:
    """Renew leases, and learn which are lost, and why."""
    body = await read_record(request, w.HeartbeatRequest)
    _check_count("leases", body.leases)
    who = speaker(caller, body.client_id, body.leases)
    beats = await episodes.broker.do(lambda board, now: board.heartbeat(caller.owner, who, body.leases, now))
    return json_response(w.HeartbeatAnswers(beats))


@router.post("/end", openapi_extra=body_of(w.EndRequests), responses=answer_of(w.EndedEpisodes))
async def end(request: Request, episodes: EpisodesNow, caller: Player) -> Response:
    """Send results; each gets its own answer. Accepted results are on disk, and may be sent again."""
    body = await read_record(request, w.EndRequests)
    _check_count("ends", body.ends)
    who = speaker(caller, body.client_id, body.ends)
    broker, began_at = episodes.broker, episodes.broker.clock.now()
    ended = await broker.do(lambda board, now: board.end(caller.owner, who, body.ends, now))
    broker.observer.ended(caller.owner, ended, began_at)
    return json_response(w.EndedEpisodes(ended))


@router.post("/release", openapi_extra=body_of(w.Release), responses=answer_of(w.HeartbeatAnswers))
async def release(request: Request, episodes: EpisodesNow, caller: Player) -> Response:
    """Give leases back without a result, so that other players may play."""
    body = await read_record(request, w.Release)
    _check_count("leases", body.leases)
    who = speaker(caller, body.client_id, body.leases)
    beats = await episodes.broker.do(lambda board, now: board.release(caller.owner, who, body.leases, body.reason, now))
    return json_response(w.HeartbeatAnswers(beats))


def _check_count(where: str, items: Sequence[object]) -> None:
    if len(items) > MAX_AT_ONCE:
        raise Refusal(400, f"{where}: at most {MAX_AT_ONCE} in one call, found {len(items)}")
