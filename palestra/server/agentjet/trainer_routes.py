"""TinkerScript's endpoints for the engine: AgentJet's names, fields and statuses.

Thin: what the calls mean is in `trainer`. Refusals that AgentJet's server sends with status 200 have it here too.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from palestra.server.agentjet.settings_file import AgentJetError
from palestra.server.agentjet.trainer import AgentJetTrainer, TrainerRefusal
from palestra.server.core.owners.callers import Caller
from palestra.server.http.episode_access import PLAYERS, Trainer
from palestra.server.http.json_records import json_response, read_record
from palestra.server.http.openapi import answer_of, body_of
from palestra.store.records import Rights
from palestra.types import tinkerscript as t
from palestra.types.tinkerscript import EngineStatus

engine_router = APIRouter(tags=["tinkerscript"])


async def _engine(request: Request) -> AgentJetTrainer:
    return request.app.state.trainer


async def _looker(request: Request) -> Caller:
    return await request.app.state.authenticator.admit_player(request, rights=PLAYERS)


async def _admin(request: Request) -> Caller:
    return await request.app.state.authenticator.admit(request, rights=(Rights.ADMIN,))


EngineNow = Annotated[AgentJetTrainer, Depends(_engine)]
Looker = Annotated[Caller, Depends(_looker)]
Admin = Annotated[Caller, Depends(_admin)]


@engine_router.get("/get_engine_status", responses=answer_of(t.EngineState))
async def get_engine_status(engine: EngineNow, caller: Looker) -> Response:
    """Returns what the trainer is doing."""
    status = engine.status(caller.owner)
    return json_response(t.EngineState(engine_status=status, detail=engine.detail(caller.owner)))


@engine_router.post(
    "/update_engine_status", openapi_extra=body_of(t.UpdateEngineStatus), responses=answer_of(t.EngineStatusUpdated)
)
async def update_engine_status(request: Request, engine: EngineNow, caller: Trainer) -> Response:
    """Take the status that a trainer reports; it is valid until the trainer reports that it is offline."""
    body = await read_record(request, t.UpdateEngineStatus, others_pass=True)
    if body.engine_status not in list(EngineStatus):
        known = ", ".join(EngineStatus)
        reason = f"engine_status: {body.engine_status[:80]!r} is unknown; use one of {known}"
        return json_response(t.EngineStatusUpdated(success=False, failure_reason=reason))
    try:
        await engine.announce(caller.owner, EngineStatus(body.engine_status))
    except TrainerRefusal as refusal:
        return json_response(t.EngineStatusUpdated(success=False, failure_reason=str(refusal)))
    return json_response(t.EngineStatusUpdated(success=True))


@engine_router.post(
    "/sync_train_config", openapi_extra=body_of(t.SyncTrainConfig), responses=answer_of(t.TrainConfigSynced)
)
async def sync_train_config(request: Request, engine: EngineNow, caller: Admin) -> Response:
    """Take AgentJet's YAML for the next start. The answer lists the resulting settings, and the keys that have no
    effect."""
    body = await read_record(request, t.SyncTrainConfig, others_pass=True)
    try:
        job = await engine.sync(caller.owner, body.yaml_as_string)
    except (TrainerRefusal, AgentJetError) as refusal:
        return json_response(t.TrainConfigSynced(success=False, error=str(refusal)))
    synced = t.TrainConfigSynced(success=True, mapped=job.mapped, unknown=job.unknown, notes=job.notes)
    return json_response(synced)


@engine_router.post("/start_engine", openapi_extra=body_of(t.StartEngine), responses=answer_of(t.EngineStarted))
async def start_engine(request: Request, engine: EngineNow, caller: Admin) -> Response:
    """Start `palestra train` as a child of this server, with the config that was synced."""
    await read_record(request, t.StartEngine, others_pass=True)
    try:
        pid = await engine.start(caller.owner, with_key=caller.key is not None)
    except TrainerRefusal as refusal:
        return json_response(t.EngineStarted(success=False, error=str(refusal)))
    return json_response(t.EngineStarted(success=True, pid=pid))


@engine_router.post("/stop_engine", openapi_extra=body_of(t.StopEngine), responses=answer_of(t.EngineStopped))
async def stop_engine(request: Request, engine: EngineNow, caller: Admin) -> Response:
    """End the training process and cancel the remaining episodes of its run. The next start continues the run."""
    await read_record(request, t.StopEngine, others_pass=True)
    try:
        stopped = await engine.stop(caller.owner)
    except TrainerRefusal as refusal:
        return json_response(t.EngineStopped(success=False, error=str(refusal)))
    return json_response(t.EngineStopped(success=True, killed_pids=stopped.pids, episodes_removed=stopped.episodes))
