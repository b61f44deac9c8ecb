"""The page of episodes, with buttons to requeue and cancel them; one episode with its attempts and calls."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse

from palestra.episodes.search import EpisodeSearch
from palestra.server.broker.service import EpisodeService
from palestra.server.core.owners.callers import Caller
from palestra.server.http.episode_access import EpisodesNow
from palestra.server.pages.access import TrainerNow
from palestra.server.pages.episode_state import PAGE, EpisodeOverview, read_episodes
from palestra.types.episode_wire import Cancel
from palestra.types.episodes import EpisodeState
from palestra.types.timelines import EpisodeTimeline
from palestra.view.api import json_response
from palestra.view.pages import Form
from palestra.view.rendering import render
from palestra.view.rollouts.messages import show_messages

REASON = "by hand, on the page of episodes"

api = APIRouter(prefix="/api/v1/episodes", tags=["episodes"])
pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


async def _query(
    run: Annotated[str, Query(max_length=128)] = "",
    state: EpisodeState | Literal[""] = "",
    find: Annotated[str, Query(max_length=1000)] = "",
) -> EpisodeSearch:
    return EpisodeSearch(run=run or None, state=state or None, task=find or None)


EpisodeQuery = Annotated[EpisodeSearch, Depends(_query)]
Offset = Annotated[int, Query(ge=0, le=1 << 40)]


@api.get("")
async def show_episodes(episodes: EpisodesNow, caller: TrainerNow, query: EpisodeQuery, offset: Offset = 0) -> Response:
    """The caller's runs with their counts, the clients that hold leases, and 100 of the episodes of a `run` and a
    `state` whose task has the text `find`. The episode API changes them: `POST /episodes/v1/requeue` and `cancel`."""
    return json_response(await read_episodes(episodes, caller.owner, query, offset))


@pages.get("/episodes")
async def episodes_page(
    request: Request, episodes: EpisodesNow, caller: TrainerNow, query: EpisodeQuery, offset: Offset = 0
) -> HTMLResponse:
    board = await read_episodes(episodes, caller.owner, query, offset)
    return _page(request, board, query, offset)


@pages.post("/episodes/requeue")
async def requeue(request: Request, episodes: EpisodesNow, caller: TrainerNow, form: Form) -> HTMLResponse:
    await episodes.requeue(caller.owner, [form.get("episode_id", "")])
    return await _row(request, episodes, caller, form)


@pages.post("/episodes/cancel")
async def cancel(request: Request, episodes: EpisodesNow, caller: TrainerNow, form: Form) -> HTMLResponse:
    chosen = Cancel(run=form.get("run", ""), episode_ids=[form.get("episode_id", "")], reason=REASON)
    await episodes.cancel(caller.owner, chosen)
    return await _row(request, episodes, caller, form)


@pages.get("/episodes/{episode_id}")
async def episode_page(request: Request, episodes: EpisodesNow, caller: TrainerNow, episode_id: str) -> HTMLResponse:
    """Shows an episode from its timeline, in which secrets are masked."""
    timeline = msgspec.json.decode(await episodes.timelines.of(caller.owner, episode_id), type=EpisodeTimeline)
    calls = timeline.attempts[-1].calls if timeline.attempts else []
    of_calls = [message for call in calls for message in (*call.messages, *call.answers)]
    messages = show_messages(of_calls or timeline.task.prompt)
    return render(request, "episode.html", one=timeline.episode, timeline=timeline, shown={"messages": messages})


def _page(request: Request, board: EpisodeOverview, query: EpisodeSearch, offset: int) -> HTMLResponse:
    template = "episodes_board.html" if "hx-request" in request.headers else "episodes.html"
    states = list(EpisodeState)
    return render(request, template, board=board, query=query, offset=offset, limit=PAGE, states=states)


async def _row(request: Request, episodes: EpisodeService, caller: Caller, form: Form) -> HTMLResponse:
    episode_id = form.get("episode_id", "")
    one = await episodes.broker.do(lambda board, _now: board.find(caller.owner, episode_id))
    return render(request, "episode_row.html", one=one)
