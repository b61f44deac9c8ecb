"""The page of a gym: its servers, their health, rollouts a second, failures."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from palestra.environments.gym.overview import read_gym
from palestra.view.api import Runs, json_response
from palestra.view.rendering import render

USUAL_SERVER = "http://127.0.0.1:8000"
"""The default address of `palestra serve`."""
api = APIRouter(prefix="/api/v1/gym", tags=["gym"])
pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@api.get("")
async def show_gym(request: Request, runs: Runs) -> Response:
    """The servers of the gym that the dashboard was given: state, restarts, calls and failures by path, rates of the
    last minute. `problem` says why none answers."""
    return json_response(await read_gym(request.app.state.gym))


@pages.get("/gym")
async def gym_page(request: Request, runs: Runs) -> HTMLResponse:
    template = "gym_tables.html" if "hx-request" in request.headers else "gym.html"
    here = f"{request.url.scheme}://{request.url.netloc}"
    gym = await read_gym(request.app.state.gym)
    return render(request, template, gym=gym, here=here, usual_server=USUAL_SERVER)
