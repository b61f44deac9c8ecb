"""The pages: the list of runs, and a run with its tabs."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from palestra.runs.control import request_stop
from palestra.view.api import LabelChange, Runs, apply_labels
from palestra.view.rendering import render
from palestra.view.runs import run_detail
from palestra.view.runs.catalogue import STAR
from palestra.view.runs.comparison import compare_runs

PAGE_RUNS = 100
PAGE_EVENTS = 500
router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form that a browser sent."""
    return dict(parse_qsl((await request.body()).decode("utf-8", "replace")))


Form = Annotated[dict[str, str], Depends(read_form)]


@router.get("/")
def show_runs(
    request: Request,
    runs: Runs,
    filter: str = "",  # noqa: A002
    sort: str = "",
    offset: int = 0,
) -> HTMLResponse:
    template = "runs_table.html" if "hx-request" in request.headers else "runs.html"
    page = runs.find(filter, PAGE_RUNS, max(0, offset), sort)
    return render(request, template, page=page, filter=filter, sort=sort, offset=max(0, offset), limit=PAGE_RUNS)


@router.get("/compare")
def show_comparison(request: Request, runs: Runs, run: Annotated[list[str] | None, Query()] = None) -> HTMLResponse:
    return render(request, "compare.html", found=compare_runs(runs, run or []))


@router.get("/runs/{run}")
def show_run(request: Request, runs: Runs, run: str) -> HTMLResponse:
    return render(request, "run.html", detail=run_detail.read_run(runs, run), tab="charts")


@router.get("/runs/{run}/head")
def show_run_head(request: Request, runs: Runs, run: str) -> HTMLResponse:
    return render(request, "run_head.html", detail=run_detail.read_run(runs, run))


@router.post("/runs/{run}/labels")
def change_labels(request: Request, runs: Runs, run: str, form: Form) -> HTMLResponse:
    apply_labels(runs, run, LabelChange(form.get("tag"), form.get("untag"), form.get("note")))
    return render(request, "run_head.html", detail=run_detail.read_run(runs, run))


@router.post("/runs/{run}/star")
def star_run(request: Request, runs: Runs, run: str) -> HTMLResponse:
    row = runs.row(runs.open(run))
    change = LabelChange(untag=STAR) if row.is_starred else LabelChange(tag=STAR)
    return render(request, "star.html", row=apply_labels(runs, run, change))


@router.post("/runs/{run}/stop")
def stop_run(request: Request, runs: Runs, run: str) -> HTMLResponse:
    request_stop(runs.open(run))
    return render(request, "run_head.html", detail=run_detail.read_run(runs, run))


@router.get("/runs/{run}/config")
def show_config(request: Request, runs: Runs, run: str, against: str = "") -> HTMLResponse:
    content = {
        "detail": run_detail.read_run(runs, run),
        "config": run_detail.read_config(runs, run, against or None),
        "others": [row.name for row in runs.find(limit=500).runs if row.name != run],
    }
    return render(request, "config.html", tab="config", **content)


@router.get("/runs/{run}/log")
def show_log(request: Request, runs: Runs, run: str, file: str = "", find: str = "") -> HTMLResponse:
    log = run_detail.read_log(runs, run, file or None, find)
    if "hx-request" in request.headers:
        return render(request, "log_lines.html", log=log)
    return render(request, "log.html", tab="log", detail=run_detail.read_run(runs, run), log=log, find=find)


@router.get("/runs/{run}/events")
def show_events(request: Request, runs: Runs, run: str) -> HTMLResponse:
    events = run_detail.read_events(runs, run)
    detail = run_detail.read_run(runs, run)
    return render(request, "events.html", tab="events", detail=detail, events=events[:PAGE_EVENTS], total=len(events))


@router.get("/runs/{run}/checkpoints")
def show_checkpoints(request: Request, runs: Runs, run: str) -> HTMLResponse:
    found = run_detail.read_checkpoints(runs, run)
    return render(request, "checkpoints.html", tab="checkpoints", detail=run_detail.read_run(runs, run), found=found)
