"""The trainer's side of the episode API over HTTP. Thin: what the calls mean is in `palestra.episodes.board`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response

from palestra.episodes.board import EpisodeBoard
from palestra.episodes.staging import PART
from palestra.server.broker.deliveries import DeliveryReading
from palestra.server.broker.service import EpisodeService
from palestra.server.core.errors import ApiError, Refusal
from palestra.server.core.owners.callers import Caller
from palestra.server.http.connection import while_connected
from palestra.server.http.episode_access import EpisodesNow, Trainer
from palestra.server.http.json_records import json_response, read_record
from palestra.server.http.openapi import answer_of, body_of
from palestra.types import episode_wire as w
from palestra.types.episodes import RunInfo

PREFIX = "/episodes/v1"
RUN = "/runs/{run:path}"
GROUPS = "/groups"
MAX_GROUPS = 256  # in one answer
INT64 = 2**63 - 1

router = APIRouter(prefix=PREFIX, tags=["episodes"])

RunName = Annotated[str, Path(pattern="^[A-Za-z0-9._:#/-]{1,128}$")]
Seconds = Annotated[float, Query(ge=0, allow_inf_nan=False)]
Number = Annotated[int, Query(ge=0, le=INT64)]


# Runs


@router.put(RUN, openapi_extra=body_of(w.PutRun), responses=answer_of(RunInfo))
async def put_run(run: RunName, request: Request, episodes: EpisodesNow, caller: Trainer) -> Response:
    """Make a run, or change its settings or its model."""
    if run.endswith(GROUPS):
        raise Refusal(400, f"run: a name must not end with {GROUPS}, which is another route; choose another name")
    body = await read_record(request, w.PutRun)
    if body.settings is not None:
        episodes.listeners.check(body.settings.push_to)
    if body.model is not None:
        await _check_model(request, caller, run, body.model)
    response = await _changed(
        "run put",
        episodes,
        caller,
        run,
        lambda board, now: board.put_run(caller.owner, run, now, settings=body.settings, model=body.model),
    )
    episodes.pushes.wake((caller.owner, run))
    return response


async def _check_model(request: Request, caller: Caller, run: str, model: str) -> None:
    """Checks that the model exists, so that players will be answered. The present weights of a run may be missing: they
    come back with its trainer, and a repeated request means the same."""
    try:
        await request.app.state.model_api.models.find(caller, model)
    except ApiError as error:
        found = await request.app.state.episodes.broker.do(lambda board, _now: board.runs(caller.owner))
        if not any(info.run == run and info.model == model for info in found):
            raise Refusal(
                400, f"model: {error.detail}; or make the run without a model and publish weights later"
            ) from error


@router.delete(RUN, responses=answer_of(w.RunDeleted))
async def delete_run(run: RunName, episodes: EpisodesNow, caller: Trainer) -> Response:
    """Delete a run with its groups and episodes, read or not; players of its episodes get `cancelled`. If the request
    is repeated, there is nothing left to delete. The name can be used again."""
    count = await episodes.broker.do(lambda board, now: board.delete_run(caller.owner, run, now))
    episodes.broker.observer.changed("run deleted", caller.owner, run, episodes=count)
    return json_response(w.RunDeleted(count))


@router.get("/runs", responses=answer_of(w.Runs))
async def list_runs(episodes: EpisodesNow, caller: Trainer) -> Response:
    """The runs of the caller, with their counts."""
    found = await episodes.broker.do(lambda board, _now: board.runs(caller.owner))
    return json_response(w.Runs([episodes.with_calls(caller.owner, info) for info in found]))


@router.post(RUN + "/weights", openapi_extra=body_of(w.Weights), responses=answer_of(RunInfo))
async def publish(run: RunName, request: Request, episodes: EpisodesNow, caller: Trainer) -> Response:
    """Publish weights: they answer model calls from now on. The run's weight policy decides about episodes that are
    being played."""
    body = await read_record(request, w.Weights)
    return await _changed(
        "weights published",
        episodes,
        caller,
        run,
        lambda board, now: board.publish(caller.owner, run, now, version=body.version, model=body.model),
        version=body.version,
        model=body.model,
    )


@router.post(RUN + "/pause", openapi_extra=body_of(w.Empty), responses=answer_of(RunInfo))
async def pause(run: RunName, request: Request, episodes: EpisodesNow, caller: Trainer) -> Response:
    """Pause a run: nothing is claimed, new model calls wait, no lease ages."""
    await read_record(request, w.Empty)
    return await _changed("run paused", episodes, caller, run, lambda board, now: board.pause(caller.owner, run, now))


@router.post(RUN + "/resume", openapi_extra=body_of(w.Empty), responses=answer_of(RunInfo))
async def resume(run: RunName, request: Request, episodes: EpisodesNow, caller: Trainer) -> Response:
    """Continue after a pause."""
    await read_record(request, w.Empty)
    response = await _changed(
        "run resumed", episodes, caller, run, lambda board, now: board.resume(caller.owner, run, now)
    )
    episodes.broker.is_resumed.wake((caller.owner, run))
    return response


async def _changed(
    what: str,
    episodes: EpisodeService,
    caller: Caller,
    run: str,
    work: Callable[[EpisodeBoard, float], RunInfo],
    **facts: object,
) -> Response:
    info = await episodes.broker.do(work)
    episodes.broker.observer.changed(what, caller.owner, run, **facts)
    return json_response(episodes.with_calls(caller.owner, info))


# Groups


@router.post(RUN + GROUPS, openapi_extra=body_of(w.NewGroups), responses=answer_of(w.RegisteredGroups))
async def register(run: RunName, request: Request, episodes: EpisodesNow, caller: Trainer) -> Response:
    """Register groups of episodes: all of them or none; known groups do not change."""
    groups = (await read_record(request, w.NewGroups)).groups
    broker, owner = episodes.broker, caller.owner
    if sum(max(group.size, group.count or 0) for group in groups) > PART:
        registered = await broker.do_in_parts(lambda board, now: board.register_in_parts(owner, run, groups, now))
    else:
        registered = await broker.do(lambda board, now: board.register(owner, run, groups, now))
    broker.observer.registered(owner, run, registered)
    return json_response(w.RegisteredGroups(registered))


@router.get(RUN + GROUPS, responses=answer_of(w.PlayedGroups))
async def read_groups(
    run: RunName,
    request: Request,
    episodes: EpisodesNow,
    caller: Trainer,
    after: Number | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_GROUPS)] = 16,
    wait_s: Seconds = 0.0,
    version: Number | None = None,
    tokens: bool = True,
) -> Response:
    """Read groups that are complete, or were dropped, in the order of their numbers: after `after`, or after the
    committed cursor. `version` is that of the weights that will be trained; groups that are too stale for them are
    dropped."""
    info = await episodes.broker.do(lambda board, _now: board.run_info(caller.owner, run))
    begin = info.committed if after is None else after
    reading = DeliveryReading(caller.owner, run, begin, limit, version)
    groups = await while_connected(request, episodes.deliveries.read(reading, wait_s=wait_s, tokens=tokens))
    page = w.PlayedGroups(groups, groups[-1].number if groups else begin)
    return Response(await asyncio.to_thread(msgspec.json.encode, page), media_type="application/json")


@router.post(RUN + "/commit", openapi_extra=body_of(w.Commit), responses=answer_of(RunInfo))
async def commit(run: RunName, request: Request, episodes: EpisodesNow, caller: Trainer) -> Response:
    """Commit the groups up to a cursor: the trainer has saved them, and the server deletes them."""
    body = await read_record(request, w.Commit)
    info = await episodes.broker.do_in_parts(
        lambda board, now: board.commit_in_parts(caller.owner, run, body.cursor, now)
    )
    episodes.broker.observer.changed("groups committed", caller.owner, run, cursor=body.cursor)
    return json_response(episodes.with_calls(caller.owner, info))


@router.get(RUN, responses=answer_of(RunInfo))
async def get_run(run: RunName, episodes: EpisodesNow, caller: Trainer) -> Response:
    """One run: settings, model, version, counts, cursor."""
    info = await episodes.broker.do(lambda board, _now: board.run_info(caller.owner, run))
    return json_response(episodes.with_calls(caller.owner, info))


# Episodes


@router.post("/cancel", openapi_extra=body_of(w.Cancel), responses=answer_of(w.Cancelled))
async def cancel(request: Request, episodes: EpisodesNow, caller: Trainer) -> Response:
    """Cancel episodes or groups; their players learn it with the next heartbeat, call or end."""
    body = await read_record(request, w.Cancel)
    return json_response(w.Cancelled(await episodes.cancel(caller.owner, body)))


@router.post("/requeue", openapi_extra=body_of(w.Requeue), responses=answer_of(w.Requeued))
async def requeue(request: Request, episodes: EpisodesNow, caller: Trainer) -> Response:
    """Put parked episodes back into the queue."""
    body = await read_record(request, w.Requeue)
    return json_response(w.Requeued(await episodes.requeue(caller.owner, body.episode_ids)))
