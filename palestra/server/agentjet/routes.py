"""TinkerScript's endpoints for players: AgentJet's names, fields and statuses, on the broker of /episodes/v1.

Thin: what the calls mean is in `palestra.episodes.board`. Refusals that AgentJet's server sends with status 200 have it
here too.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from functools import partial

from fastapi import APIRouter, Request, Response
from msgspec import to_builtins
from msgspec.structs import replace

from palestra.episodes.board import EpisodeBoard
from palestra.server.agentjet import registration
from palestra.server.agentjet.buffer import buffer_of
from palestra.server.agentjet.names import lease_id_of, lease_of, uuid_of
from palestra.server.agentjet.outputs import result_of
from palestra.server.agentjet.trainer import AgentJetTrainer
from palestra.server.broker.claims import Claim
from palestra.server.broker.service import EpisodeService
from palestra.server.core.errors import Refusal
from palestra.server.core.owners.callers import TRAINERS
from palestra.server.http.connection import while_connected
from palestra.server.http.episode_access import Claimant, EpisodesNow, Player, Trainer, endpoint, holder, speaker
from palestra.server.http.json_records import json_response, read_record
from palestra.server.http.openapi import answer_of, body_of
from palestra.types import tinkerscript as t
from palestra.types.episodes import ClaimRequest, EndAnswer, EndRequest, EndStatus, HeartbeatAnswer, Lease
from palestra.types.rollouts import Task
from palestra.types.tinkerscript import EngineStatus

HOLD_S = 20.0  # AgentJet's client hangs up after 30 s, and sleeps for 5 s after a refusal
LOOK_S = 0.25
"""Interval at which an engine is checked whose weights are being published."""

ADVICE = {
    EngineStatus.OFFLINE: "there is no trainer; start one with palestra train rollouts=episodes or POST /start_engine",
    EngineStatus.BOOTING: "the engine is starting; try again later",
    EngineStatus.WEIGHT_SYNCING: "new weights are being loaded; try again in a few seconds",
    EngineStatus.WEIGHT_EXPORTING: "weights are being written to disk; try again in a few seconds",
}
THEIR_NAMES = {"client_id": "client_uuid", "lease_s": "allow_discard_timeout"}
FIRST_WORD = re.compile(r"^\w+")
MAX_LISTED = 10_000
RELEASED = "lease_lost: released"
"""The board's message for an attempt that was released, now or before."""
PASSES_SOON = (EngineStatus.WEIGHT_SYNCING, EngineStatus.WEIGHT_EXPORTING)
NOTHING = "no episode is waiting: the trainer has registered no more, or all are being played"

playing_router = APIRouter(tags=["tinkerscript"])


@playing_router.get("/health", responses=answer_of(t.Health))
async def health() -> Response:
    """Whether the server answers."""
    return json_response(t.Health("ok"))


@playing_router.post("/claim_episode", openapi_extra=body_of(t.ClaimEpisode), responses=answer_of(t.ClaimedEpisode))
async def claim_episode(request: Request, episodes: EpisodesNow, caller: Claimant) -> Response:
    """Claim an episode of any run of the key's owner. Waits a while for one, so that few clients have to sleep."""
    body = await read_record(request, t.ClaimEpisode, others_pass=True)
    try:
        claim = _claim(body, caller.owner, holder(caller, body.client_uuid))
        got = await _claimed(request, episodes, claim)
    except Refusal as error:
        if error.status == 400:
            raise Refusal(400, _by_their_names(error.detail)) from None
        if error.status not in (409, 429):
            raise
        got = error.detail
    if isinstance(got, str):
        return json_response(t.ClaimedEpisode(success=False, fail_cause=got))
    return json_response(_with_reason(body.client_uuid, got))


@playing_router.get("/v1/task", responses=answer_of(Task))
async def attempt_task(episodes: EpisodesNow, caller: Player) -> Response:
    """The task of the attempt whose key asks. AgentJet's own class keeps of a claim only the model's address and the
    key: both lead here."""
    attempt = caller.attempt
    if attempt is None:
        raise Refusal(403, "this is for the key of an attempt: send the openai_api_key that came with its claim")
    if not episodes.broker.keys.is_live(attempt):
        raise Refusal(403, f"episode {attempt.episode_id}, attempt {attempt.attempt} is over; claim another")
    return json_response(episodes.broker.apply(lambda board, _now: board.task(attempt.owner, attempt.episode_id)))


@playing_router.post("/end_episode", openapi_extra=body_of(t.EndEpisode), responses=answer_of(t.EpisodeEnded))
async def end_episode(request: Request, episodes: EpisodesNow, caller: Player) -> Response:
    """End an episode with its result, which is checked and stored before the answer. 400: there is no such episode, or
    the output cannot be trained on."""
    body = await read_record(request, t.EndEpisode, others_pass=True)
    result = result_of(body.workflow_output)

    def end(board: EpisodeBoard, now: float) -> EndAnswer:
        lease = lease_of(board, caller.owner, body.episode_uuid, body.lease_id)
        who = speaker(caller, body.client_uuid, [lease])
        ends = [EndRequest(episode_id=lease.episode_id, attempt=lease.attempt, result=result)]
        return board.end(caller.owner, who, ends, now)[0]

    broker, began_at = episodes.broker, episodes.broker.clock.now()
    ended = await broker.do(end)
    broker.observer.ended(caller.owner, [ended], began_at)
    if ended.status is EndStatus.UNKNOWN:
        raise Refusal(400, f"Episode {body.episode_uuid[:128]} not found; it may have been delivered and deleted")
    if ended.status is EndStatus.INVALID:
        raise Refusal(400, f"workflow_output: {ended.detail}")
    return json_response(t.EpisodeEnded(success=ended.is_kept, failure_reason=ended.detail))


@playing_router.post("/abort_episode", openapi_extra=body_of(t.AbortEpisode), responses=answer_of(t.EpisodeEnded))
async def abort_episode(request: Request, episodes: EpisodesNow, caller: Player) -> Response:
    """Give an episode back for another player; an output that is sent with it does not count."""
    body = await read_record(request, t.AbortEpisode, others_pass=True)

    def release(board: EpisodeBoard, now: float) -> HeartbeatAnswer:
        lease = lease_of(board, caller.owner, body.episode_uuid, body.lease_id)
        who = speaker(caller, body.client_uuid, [lease])
        return board.release(caller.owner, who, [lease], body.reason, now)[0]

    released = await episodes.broker.do(release)
    is_released = released.reason.startswith(RELEASED)
    return json_response(t.EpisodeEnded(success=is_released, failure_reason="" if is_released else released.reason))


@playing_router.post(
    "/can_continue_episode", openapi_extra=body_of(t.ContinueEpisode), responses=answer_of(t.CanContinue)
)
async def can_continue_episode(request: Request, episodes: EpisodesNow, caller: Player) -> Response:
    """Whether an episode still belongs to this client. This also renews the lease."""
    body = await read_record(request, t.ContinueEpisode, others_pass=True)

    def beat(board: EpisodeBoard, now: float) -> t.CanContinue:
        lease = lease_of(board, caller.owner, body.episode_uuid, body.lease_id)
        who = speaker(caller, body.client_uuid, [lease])
        (released,) = board.heartbeat(caller.owner, who, [lease], now)
        return t.CanContinue(can_continue=released.can_continue, reason=released.reason)

    return json_response(await episodes.broker.do(beat))


@playing_router.post(
    "/register_episode", openapi_extra=body_of(t.RegisterEpisode), responses=answer_of(t.EpisodeRegistered)
)
async def register_episode(request: Request, episodes: EpisodesNow, caller: Trainer) -> Response:
    """Register an episode for an external trainer. Registering it again changes nothing; its result is sent to the
    address of the trainer."""
    body = await read_record(request, t.RegisterEpisode, others_pass=True)
    return json_response(await registration.register(episodes, caller.owner, body))


@playing_router.post("/get_episode_buffer", openapi_extra=body_of(t.BufferQuery), responses=answer_of(t.EpisodeBuffer))
async def get_episode_buffer(request: Request, episodes: EpisodesNow, caller: Claimant) -> Response:
    """The episodes that wait or are played: all of them for a trainer's key; for a worker's key those that it plays
    itself."""
    body = await read_record(request, t.BufferQuery, others_pass=True)
    if not 1 <= body.limit <= MAX_LISTED:
        raise Refusal(400, f"limit: 1 to {MAX_LISTED} is allowed, found {body.limit}")
    holders = None if caller.right in TRAINERS else holder(caller, "x")[:-1]
    found = episodes.broker.do(lambda board, _now: buffer_of(board, caller.owner, holders, body.limit))
    return json_response(await found)


def _claim(body: t.ClaimEpisode, owner: str, who: str) -> Claim:
    wait_s = HOLD_S if body.wait_s is None else body.wait_s
    if not (math.isfinite(wait_s) and wait_s >= 0):
        raise Refusal(400, f"wait_s: 0 seconds or more, found {wait_s}")
    request = ClaimRequest(
        client_id=who,
        claim_id=secrets.token_hex(16) if body.claim_id is None else body.claim_id,
        kind=body.episode_type,
        wait_s=wait_s,
        lease_s=body.allow_discard_timeout,
    )
    return Claim(owner, request)


def _by_their_names(detail: str) -> str:
    """Replaces our field names in an error text by those that the client has sent."""
    return FIRST_WORD.sub(lambda word: THEIR_NAMES.get(word[0], word[0]), detail)


async def _claimed(request: Request, episodes: EpisodeService, claim: Claim) -> Lease | str:
    """Returns a lease, or why there is none. A client that hangs up while it waits has claimed nothing."""
    hold, engine = partial(while_connected, request), request.app.state.trainer
    loop, wait_s = asyncio.get_running_loop(), min(claim.request.wait_s, episodes.broker.config.max_wait_s)
    until = loop.time() + wait_s
    status = engine.status(claim.owner)
    if status in PASSES_SOON:
        status = await hold(_settled(engine, claim.owner, episodes, until))
    if status is not EngineStatus.ROLLING:
        return f"{status}: {ADVICE[status]}"
    left_s = max(until - loop.time(), 0.0)
    remaining = replace(claim.request, wait_s=left_s)
    base_url, model = endpoint(request)
    next_claim = Claim(
        claim.owner, remaining, partial(_is_rolling, engine, claim.owner), base_url=base_url, model=model
    )
    leases = await episodes.claims.claim(next_claim, hold)
    if leases:
        return leases[0]
    status = engine.status(claim.owner)
    return NOTHING if status is EngineStatus.ROLLING else f"{status}: {ADVICE[status]}"


def _is_rolling(engine: AgentJetTrainer, owner: str) -> bool:
    return engine.status(owner) is EngineStatus.ROLLING


async def _settled(engine: AgentJetTrainer, owner: str, episodes: EpisodeService, until: float) -> EngineStatus:
    """Returns the engine's status when its weights are in place, or when the time is over."""
    loop = asyncio.get_running_loop()
    while (status := engine.status(owner)) in PASSES_SOON:
        left_s = until - loop.time()
        if left_s <= 0 or episodes.broker.is_stopping:
            break
        await asyncio.sleep(min(LOOK_S, left_s))
    return status


def _with_reason(client_uuid: str, lease: Lease) -> t.ClaimedEpisode:
    return t.ClaimedEpisode(
        success=True,
        client_uuid=client_uuid,
        episode_uuid=uuid_of(lease),
        openai_base_url=lease.base_url,
        openai_api_key=lease.api_key,
        lease_id=lease_id_of(lease),
        attempt=lease.attempt,
        task=to_builtins(lease.task),
        group_id=lease.group_id,
        index_in_group=lease.index,
        weight_version=lease.version,
        deadline=lease.deadline,
        model=lease.model,
        seed=lease.seed,
    )
