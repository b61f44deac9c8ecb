"""The JSON API of the dashboard, version 1: what its pages show, for programs."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse

from palestra.runs.control import request_stop
from palestra.runs.labels import add_note, add_tag, remove_tag
from palestra.runs.pictures import read_picture
from palestra.runs.reader import Part, RunNotFound
from palestra.util.picture_headers import BadPicture, read_header
from palestra.view.access import PageAccess
from palestra.view.live import follow
from palestra.view.rollouts import rollout_detail
from palestra.view.rollouts.rollout_list import Order, RolloutQuery, list_rollouts
from palestra.view.runs import run_detail
from palestra.view.runs.catalogue import Catalogue
from palestra.view.runs.charts import Axis, Window, read_series
from palestra.view.runs.checkpoint_scores import read_run_board
from palestra.view.runs.comparison import compare_charts, compare_runs

PICTURE_HEADERS = {"Cache-Control": "private, max-age=31536000, immutable", "Content-Disposition": "inline"}
"""A file is named by its content, so a browser may keep it. Those of all answers forbid it to run or embed anything."""
MAX_POINTS = 5000
MAX_DIGITS = 19  # of a place in a file
router = APIRouter(prefix="/api/v1", tags=["dashboard"])


class LabelChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of: a tag to give, a tag to take away, a note to add."""

    tag: str | None = None
    untag: str | None = None
    note: str | None = None


def get_catalogue(request: Request) -> Catalogue:
    """Every route that shows runs depends on it by `Runs`: a server overrides it, so that only admins see run
    folders."""
    return request.app.state.catalogue


def get_window(
    x: Axis = Axis.STEP,
    low: float = -math.inf,
    high: float = math.inf,
    points: Annotated[int, Query(ge=10, le=MAX_POINTS)] = 1000,
) -> Window:
    return Window(x, low, high, points)


def get_query(
    part: Part = Part.ROLLOUTS,
    step: Annotated[int | None, Query(ge=0)] = None,
    where: str = "",
    order: Order = Order.SURPRISING,
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 60,
) -> RolloutQuery:
    return RolloutQuery(part, step, where, order, offset, limit)


Runs = Annotated[Catalogue, Depends(get_catalogue)]
Shown = Annotated[Window, Depends(get_window)]
AskedRollouts = Annotated[RolloutQuery, Depends(get_query)]


@router.get("/runs")
def list_runs(
    runs: Runs,
    filter: str = "",  # noqa: A002
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    offset: Annotated[int, Query(ge=0)] = 0,
    sort: str = "",
) -> Response:
    """The runs, newest first, starred ones before them; `filter` as on the page. `sort` is a column of the page, such
    as `reward`, or `-reward` for the highest first."""
    return json_response(runs.find(filter, limit, offset, sort))


@router.get("/runs/{run}")
def show_run(run: str, runs: Runs) -> Response:
    """The state of a run, how it was started, and what asks to be looked at."""
    return json_response(run_detail.read_run(runs, run))


@router.get("/runs/{run}/charts")
def show_charts(run: str, runs: Runs, window: Shown) -> Response:
    """All charts of the run's page, with at most `points` points each, chosen by LTTB; `x` is `step`, `time` or
    `tokens`, `low` and `high` bound it. Below them, over steps, the scores of its checkpoints on benchmarks."""
    return json_response(read_run_board(runs, run, window))


@router.get("/runs/{run}/series")
def show_series(run: str, runs: Runs, window: Shown, name: Annotated[list[str], Query()]) -> Response:
    """Metrics by name, over one axis, as `charts` has them."""
    return json_response(read_series(runs.metrics(runs.open(run)), name[:50], window))


@router.get("/runs/{run}/live", response_class=StreamingResponse)
def watch_run(
    run: str, runs: Runs, request: Request, after: Annotated[int | None, Query(ge=0)] = None
) -> StreamingResponse:
    """Server-sent events while the run writes: `metrics`, `state`, `gone`. Goes on behind `Last-Event-ID`, or `after`;
    without either, from now on."""
    found = runs.open(run)
    known = request.headers.get("last-event-id", "")
    position = (
        int(known)
        if known.isdecimal() and len(known) < MAX_DIGITS
        else after
        if after is not None
        else runs.metrics(found).offset
    )
    access: PageAccess = request.app.state.access
    events = follow(found, position, lambda: access.admits(request.scope), request.app.state.is_stopping)
    return StreamingResponse(events, media_type="text/event-stream")


@router.get("/runs/{run}/config")
def show_config(run: str, runs: Runs, against: str | None = None) -> Response:
    """The config as dotted keys; with `against`, beside that of another run."""
    return json_response(run_detail.read_config(runs, run, against or None))


@router.get("/runs/{run}/log")
def show_log(run: str, runs: Runs, file: str | None = None, find: str = "") -> Response:
    """The last lines of a log, or the last of those that have the text `find`."""
    return json_response(run_detail.read_log(runs, run, file or None, find))


@router.get("/runs/{run}/events")
def show_events(run: str, runs: Runs) -> Response:
    """Returns what happened to the run, newest first."""
    return json_response(run_detail.read_events(runs, run))


@router.get("/runs/{run}/checkpoints")
def show_checkpoints(run: str, runs: Runs) -> Response:
    """The checkpoints that are kept, newest first, with the scores of their steps."""
    return json_response(run_detail.read_checkpoints(runs, run))


@router.get("/runs/{run}/rollouts")
def show_rollouts(run: str, runs: Runs, query: AskedRollouts) -> Response:
    """Rollouts of a step in groups, or of the newest steps: those that fit `where`, a condition as `palestra rollout
    list` has it, ordered by `order`; with counts by environment, stop and error, and a histogram of rewards. `part` is
    `rollouts` or `eval`."""
    return json_response(list_rollouts(runs, run, query))


@router.get("/runs/{run}/rollout")
def show_rollout(run: str, runs: Runs, step: int, id: str, part: Part = Part.ROLLOUTS) -> Response:  # noqa: A002
    """One rollout with its conversation, and the others of its group."""
    return json_response(rollout_detail.read_rollout(runs, run, part, step, id))


@router.get("/runs/{run}/picture")
def show_picture(run: str, runs: Runs, digest: str) -> Response:
    """A picture that rollouts of the run name: the file, as it came from a dataset or an environment."""
    data = read_picture(runs.open(run).path, digest)
    if data is None:
        raise RunNotFound(f"{run} keeps no picture {digest[:12]!r}")
    try:
        media_type = read_header(data).media_type
    except BadPicture as error:
        raise RunNotFound(f"the picture {digest[:12]!r} of {run} {error}") from None
    return Response(data, media_type=media_type, headers=PICTURE_HEADERS)


@router.get("/runs/{run}/tokens")
def show_tokens(run: str, runs: Runs, step: int, id: str) -> Response:  # noqa: A002
    """Every token of a rollout, or of a branch of one, in columns: text, origin, turn, log-probabilities of the sampler
    and the trainer, advantage."""
    return json_response(rollout_detail.read_tokens(runs, run, step, id))


@router.get("/runs/{run}/test-case", response_class=PlainTextResponse)
def show_test_case(run: str, runs: Runs, step: int, id: str, part: Part = Part.ROLLOUTS) -> Response:  # noqa: A002
    """A rollout as Python, to begin a test of its environment with."""
    detail = rollout_detail.read_rollout(runs, run, part, step, id)
    return PlainTextResponse(rollout_detail.write_test_case(detail))


@router.post("/runs/{run}/labels")
async def change_labels(run: str, runs: Runs, request: Request) -> Response:
    """Gives the run a `tag`, takes one away (`untag`) or adds a `note`; returns its row."""
    change = msgspec.json.decode(await request.body(), type=LabelChange)
    return json_response(apply_labels(runs, run, change))


@router.post("/runs/{run}/stop")
def stop_run(run: str, runs: Runs) -> Response:
    """Asks the run to end after its step, with a checkpoint."""
    return json_response({"stopping": request_stop(runs.open(run))})


def apply_labels(runs: Catalogue, name: str, change: LabelChange) -> object:
    found = runs.open(name)
    if change.tag:
        add_tag(found.path, change.tag.strip())
    if change.untag:
        remove_tag(found.path, change.untag)
    if change.note:
        add_note(found.path, change.note)
    return runs.row(found)


@router.get("/compare")
def show_comparison(runs: Runs, run: Annotated[list[str], Query()]) -> Response:
    """Two to eight runs beside each other: where their configs differ, their newest metrics, and tasks of their last
    evaluations that one solved and another did not."""
    return json_response(compare_runs(runs, run))


@router.get("/compare/charts")
def show_compared_charts(runs: Runs, window: Shown, run: Annotated[list[str], Query()]) -> Response:
    """A chart for each of the metrics looked at first, with a line for each of the runs."""
    return json_response(compare_charts(runs, run, window))


def json_response(content: object) -> Response:
    return Response(msgspec.json.encode(content, enc_hook=str), media_type="application/json")
