"""The player's side of the episode API over HTTP. Thin: what the calls mean is in `palestra.episodes.board`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from fastapi import APIRouter, Request, Response
from msgspec.structs import replace

from palestra.server.episodes import wire as w
from palestra.server.episodes.access import Claimant, EpisodesNow, Player, holder, speaker
from palestra.server.episodes.bodies import json_response, read_record
from palestra.server.episodes.claims import Claim
from palestra.server.episodes.routes import PREFIX
from palestra.server.errors import Refusal
from palestra.server.openai.connection import while_connected
from palestra.server.openapi import answer_of, body_of
from palestra.types.episodes import ClaimRequest, Lease

MAX_AT_ONCE = 4096  # leases that one call speaks of
ASK_AGAIN_S = 1.0

router = APIRouter(prefix=PREFIX, tags=["episodes"])


@router.post("/claim", openapi_extra=body_of(ClaimRequest), responses=answer_of(w.Claimed))
async def claim(request: Request, episodes: EpisodesNow, caller: Claimant) -> Response:
    """Waits for something to play, up to `wait_s`. Who leaves meanwhile has claimed nothing."""
    asked = await read_record(request, ClaimRequest)
    if not asked.wait_s >= 0:
        raise Refusal(400, f"wait_s: 0 seconds or more, found {asked.wait_s}")
    asked = replace(asked, client_id=holder(caller, asked.client_id))
    wanted = Claim(caller.owner, asked)
    leases = await episodes.claims.claim(wanted, partial(while_connected, request))
    if not leases:
        return json_response(w.Claimed([], ASK_AGAIN_S, episodes.claims.why_nothing(wanted)))
    return json_response(w.Claimed(addressed(request, leases), 0.0))


def addressed(request: Request, leases: Sequence[Lease]) -> list[Lease]:
    """With what their holder reaches the model by."""
    hub = request.app.state.hub
    url, model = f"{hub.config.episodes.url or _own_url(request)}/v1", next(iter(hub.workers))
    return [replace(lease, base_url=url, model=lease.model or model) for lease in leases]


def _own_url(request: Request) -> str:
    scope = request.scope
    host = next((value for name, value in scope["headers"] if name == b"host"), None)
    server = scope.get("server")
    return _url_of(scope["scheme"], server and tuple(server), host, scope.get("root_path", ""))


@lru_cache(maxsize=64)
def _url_of(scheme: str, server: tuple[str, int | None] | None, host: bytes | None, root_path: str) -> str:
    headers = [] if host is None else [(b"host", host)]
    parts = {"scheme": scheme, "server": server, "headers": headers, "path": "/", "root_path": root_path}
    return str(Request({"type": "http", "query_string": b"", **parts}).base_url).rstrip("/")


@router.post("/heartbeat", openapi_extra=body_of(w.Heartbeat), responses=answer_of(w.Beats))
async def heartbeat(request: Request, episodes: EpisodesNow, caller: Player) -> Response:
    """Keeps leases, and tells which are lost, and why."""
    body = await read_record(request, w.Heartbeat)
    _check_count("leases", body.leases)
    who = speaker(caller, body.client_id, body.leases)
    beats = await episodes.broker.do(lambda board, now: board.heartbeat(caller.owner, who, body.leases, now))
    return json_response(w.Beats(beats))


@router.post("/end", openapi_extra=body_of(w.Ends), responses=answer_of(w.EndedEpisodes))
async def end(request: Request, episodes: EpisodesNow, caller: Player) -> Response:
    """Results; each is answered for itself. What is accepted is on disk, and may be sent again."""
    body = await read_record(request, w.Ends)
    _check_count("ends", body.ends)
    who = speaker(caller, body.client_id, body.ends)
    broker, began_at = episodes.broker, episodes.broker.clock.now()
    ended = await broker.do(lambda board, now: board.end(caller.owner, who, body.ends, now))
    broker.observer.ended(caller.owner, ended, began_at, broker.clock.now())
    return json_response(w.EndedEpisodes(ended))


@router.post("/release", openapi_extra=body_of(w.Release), responses=answer_of(w.Beats))
async def release(request: Request, episodes: EpisodesNow, caller: Player) -> Response:
    """Gives leases back, without a result: somebody else may play."""
    body = await read_record(request, w.Release)
    _check_count("leases", body.leases)
    who = speaker(caller, body.client_id, body.leases)
    work = episodes.broker.do(lambda board, now: board.release(caller.owner, who, body.leases, body.reason, now))
    return json_response(w.Beats(await work))


def _check_count(where: str, items: Sequence[object]) -> None:
    if len(items) > MAX_AT_ONCE:
        raise Refusal(400, f"{where}: at most {MAX_AT_ONCE} in one call, found {len(items)}")
