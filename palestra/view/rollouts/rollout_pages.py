"""The pages of rollouts: groups of a step, and one rollout with its tokens."""

from __future__ import annotations

from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from palestra.runs.reader import Part
from palestra.runs.rollout_filter import WhereError
from palestra.view.api import AskedRollouts, Runs
from palestra.view.rendering import render
from palestra.view.rollouts.rollout_detail import read_rollout
from palestra.view.rollouts.rollout_list import Order, RolloutList, RolloutQuery, list_rollouts
from palestra.view.runs import run_detail

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@router.get("/runs/{run}/rollouts")
def show_rollouts(request: Request, runs: Runs, run: str, query: AskedRollouts, every: bool = False) -> HTMLResponse:
    """Shows the rollouts of a step, by default the newest; `every` shows all steps. A run that has only evaluated shows
    those."""
    detail = run_detail.read_run(runs, run)
    if "part" not in request.query_params and detail.eval_steps and not detail.rollout_steps:
        query = RolloutQuery(Part.EVAL, query.step, query.where, query.order, query.offset, query.limit)
    steps = detail.eval_steps if query.part is Part.EVAL else detail.rollout_steps
    if query.step is None and steps and not every:
        query = RolloutQuery(query.part, steps[-1], query.where, query.order, query.offset, query.limit)
    problem = None
    try:
        found = list_rollouts(runs, run, query)
    except WhereError as error:
        problem = str(error)
        plain = RolloutQuery(query.part, query.step, "", query.order, query.offset, query.limit)
        found = list_rollouts(runs, run, plain)
    content = {"found": found, "problem": problem, "where": query.where, "every": every, "query": query}
    status = 200 if problem is None else 400
    links = RolloutLinks(found, query, every)
    return render(
        request, "rollouts.html", status, tab="rollouts", detail=detail, orders=list(Order), links=links, **content
    )


@router.get("/runs/{run}/rollout")
def show_rollout(
    request: Request,
    runs: Runs,
    run: str,
    step: int,
    id: str,  # noqa: A002
    part: Part = Part.ROLLOUTS,
    beside: str = "",
    beside_run: str = "",
    beside_step: int | None = None,
) -> HTMLResponse:
    """`beside` is another rollout, of the same step unless another is named, shown at its side."""
    shown = read_rollout(runs, run, part, step, id)
    there = step if beside_step is None else beside_step
    other = read_rollout(runs, beside_run or run, part, there, beside) if beside else None
    return render(request, "rollout.html", shown=shown, other=other)


class RolloutLinks:
    """Addresses of the same page with something else chosen."""

    def __init__(self, found: RolloutList, query: RolloutQuery, every: bool) -> None:
        self._found, self._query = found, query
        self._now: dict[str, object] = {"part": query.part, "where": query.where, "order": query.order}
        self._now |= {"every": 1} if every else {"step": query.step if query.step is not None else ""}

    def to(self, **changes: object) -> str:
        chosen = {name: value for name, value in {**self._now, **changes}.items() if value not in (None, "")}
        if "step" in changes:
            chosen.pop("every", None)
        return f"?{urlencode(chosen)}"

    @property
    def previous(self) -> int | None:
        steps = [step for step in self._found.steps if self._query.step is not None and step < self._query.step]
        return steps[-1] if steps else None

    @property
    def next(self) -> int | None:
        steps = [step for step in self._found.steps if self._query.step is not None and step > self._query.step]
        return steps[0] if steps else None
