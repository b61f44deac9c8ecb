"""The page on which the task of a rollout is played again, by any model of this server or checkpoint of its run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from msgspec import Struct

from palestra.runs.reader import Part
from palestra.runs.record_files import RunError
from palestra.runs.saved_checkpoints import list_checkpoints
from palestra.server.core.errors import Refusal
from palestra.server.core.owners.callers import Caller
from palestra.server.core.task_replays import TaskReplays
from palestra.server.pages.access import AdminNow
from palestra.server.pages.playground_routes import known_checkpoints, offered_models
from palestra.view.api import Runs
from palestra.view.pages import Form
from palestra.view.rendering import render
from palestra.view.rollouts.play_again import SAMPLES, PlayAgain
from palestra.view.rollouts.rollout_detail import RolloutDetail, read_rollout
from palestra.view.runs.catalogue import Catalogue

pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


class ReplayModel(Struct, frozen=True):
    id: str
    """Its name for `palestra eval --model`."""
    title: str
    is_here: bool
    """Whether this server has it; for another, one is started."""


def _shown(runs: Runs, run: str, step: int, id: str, part: Part = Part.ROLLOUTS) -> RolloutDetail:  # noqa: A002
    return read_rollout(runs, run, part, step, id)


ReplayedRollout = Annotated[RolloutDetail, Depends(_shown)]


@pages.get("/again")
async def replay_page(request: Request, caller: AdminNow, shown: ReplayedRollout) -> HTMLResponse:
    models = await _models(request, caller, shown.run, shown.again)
    return render(request, "again.html", shown=shown, models=models, samples=SAMPLES)


@pages.post("/again")
async def replay(request: Request, caller: AdminNow, shown: ReplayedRollout, form: Form) -> RedirectResponse:
    """Plays it, and leads to the folder of the evaluation, which follows while it is played."""
    models = await _models(request, caller, shown.run, shown.again)
    model = next((one for one in models if one.id == form.get("model")), None)
    if model is None:
        raise Refusal(400, "model: choose one of those that are offered")
    replays: TaskReplays = request.app.state.replays
    catalogue: Catalogue = request.app.state.catalogue
    server = _own_address(request) if model.is_here else None
    name = await replays.start(caller, [*shown.again.arguments, model.id], Path(catalogue.root), server)
    return RedirectResponse(f"./runs/{name}", status_code=303)


async def _models(request: Request, caller: Caller, run: str, again: PlayAgain) -> list[ReplayModel]:
    """The checkpoints of the run, the newest first, then what the playground offers, then the run's base model."""
    here = await known_checkpoints(request, caller)
    try:
        saved = await asyncio.to_thread(list_checkpoints, request.app.state.catalogue.open(run))
    except RunError:  # a damaged file; the others can still be named
        saved = []
    addresses = {one.name: one.address for one in saved}
    found = [
        ReplayModel(addresses[name], name, True) if addresses.get(name) in here else ReplayModel(name, name, False)
        for name in again.models
    ]
    served = [ReplayModel(one.id, one.id, True) for one in await offered_models(request, caller)]
    taken = {one.id for one in served}
    return [*(one for one in found if one.id not in taken), *served]


def _own_address(request: Request) -> str:
    """Returns the address at which this server itself listens, without its proxy."""
    host, port = request.scope["server"]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
