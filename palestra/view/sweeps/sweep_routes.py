"""The pages of sweeps, and the same as JSON."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from palestra.runs.control import request_stop
from palestra.runs.reader import RunNotFound
from palestra.view.api import Runs, json_response
from palestra.view.rendering import render
from palestra.view.sweeps.sweep_detail import open_sweep, parallel_coordinates, read_curves, read_sweep, read_sweeps

api = APIRouter(prefix="/api/v1/sweeps", tags=["sweeps"])
pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@api.get("")
def list_sweeps(runs: Runs) -> Response:
    """The sweeps of the folder, newest first, each with its best setting so far."""
    return json_response(read_sweeps(runs))


@api.get("/{sweep}")
def show_sweep(sweep: str, runs: Runs) -> Response:
    """Shows what a sweep has found: its settings from the best to the worst with their spread over seeds, the
    importance of each key, all runs, and what was decided about them."""
    return json_response(read_sweep(runs, sweep))


@api.get("/{sweep}/charts")
def show_curves(sweep: str, runs: Runs) -> Response:
    """The curves of the best settings, means over their seeds, in the form of a run's charts."""
    return json_response(read_curves(read_sweep(runs, sweep)))


@pages.get("/sweeps")
def sweeps_page(request: Request, runs: Runs) -> HTMLResponse:
    return render(request, "sweeps.html", sweeps=read_sweeps(runs))


@pages.get("/sweeps/{sweep}")
def sweep_page(request: Request, runs: Runs, sweep: str) -> HTMLResponse:
    return _render(request, runs, sweep, "sweep_tables.html" if "hx-request" in request.headers else "sweep.html")


@pages.post("/sweeps/{sweep}/stop/{member}")
def stop_member(request: Request, runs: Runs, sweep: str, member: str) -> HTMLResponse:
    """Ends a run of the sweep after its step; the others go on."""
    if member not in {one.name for one in open_sweep(runs, sweep).plan.members}:
        raise RunNotFound(f"{member[:100]!r} is no run of sweep {sweep}")
    request_stop(runs.open(member))
    return _render(request, runs, sweep, "sweep_tables.html")


def _render(request: Request, runs: Runs, sweep: str, template: str) -> HTMLResponse:
    found = read_sweep(runs, sweep)
    return render(request, template, found=found, lines=parallel_coordinates(found))
