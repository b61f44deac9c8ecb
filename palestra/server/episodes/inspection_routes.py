"""Inspecting episodes over HTTP, for trainers: searching, showing one with its timeline, exporting as lines."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query, Response
from fastapi.responses import StreamingResponse

from palestra.episodes.search import EpisodeSearch
from palestra.server.core.errors import Refusal
from palestra.server.core.pictures.picture_cache import PictureCache
from palestra.server.episodes.routes import PREFIX, Number
from palestra.server.http.episode_access import EpisodesNow, Trainer
from palestra.server.http.json_records import json_response
from palestra.server.http.openapi import LINES, Responses, answer_of
from palestra.types import episode_wire as w
from palestra.types.episodes import EpisodeInfo, EpisodeState
from palestra.types.timelines import EpisodeTimeline

LISTED, MAX_LISTED = 100, 1000

router = APIRouter(prefix=PREFIX, tags=["episodes"])

Reward = Annotated[float | None, Query(allow_inf_nan=False)]
Words = Annotated[str | None, Query(max_length=1000)]


async def _search(
    run: Annotated[str | None, Query(max_length=128)] = None,
    state: EpisodeState | None = None,
    reward_min: Reward = None,
    reward_below: Reward = None,
    error: Words = None,
    task: Words = None,
) -> EpisodeSearch:
    return EpisodeSearch(run=run, state=state, reward_min=reward_min, reward_below=reward_below, error=error, task=task)


EpisodeQuery = Annotated[EpisodeSearch, Depends(_search)]

PAGE_OR_LINES: Responses = {200: {"content": {**answer_of(w.EpisodePage)[200]["content"], LINES: {}}}}


@router.get("/episodes", responses=PAGE_OR_LINES)
async def list_episodes(
    episodes: EpisodesNow,
    caller: Trainer,
    query: EpisodeQuery,
    limit: Annotated[int | None, Query(ge=1)] = None,
    offset: Number = 0,
    format: Literal["json", "jsonl"] = "json",  # noqa: A002 - its name in the URL
) -> Response:
    """Lists episodes in the order of registration; 100 of them, or `limit`, up to 1000. `error` and `task` search for a
    text. With `format=jsonl`, each line is the timeline of an episode; without `limit` all are returned."""
    looking = episodes.timelines
    if format == "jsonl":
        searching = await looking.begin(caller.owner, query, limit=limit, offset=offset)
        return StreamingResponse(looking.lines(caller.owner, searching), media_type=LINES)
    if limit is not None and limit > MAX_LISTED:
        raise Refusal(400, f"limit: at most {MAX_LISTED} in one answer, found {limit}; use offset for the next ones")
    found = await looking.search(caller.owner, query, limit=limit or LISTED, offset=offset)
    return json_response(w.EpisodePage(found.episodes, found.total))


@router.get("/episodes/{episode_id}", responses=answer_of(EpisodeInfo))
async def get_episode(episode_id: str, episodes: EpisodesNow, caller: Trainer) -> Response:
    """One episode, with the attempts that were lost and why."""
    return json_response(await episodes.broker.do(lambda board, _now: board.find(caller.owner, episode_id)))


@router.get("/episodes/{episode_id}/timeline", responses=answer_of(EpisodeTimeline))
async def get_timeline(episode_id: str, episodes: EpisodesNow, caller: Trainer) -> Response:
    """The attempts of an episode with their model calls and tools. Keys, and what `episodes.mask` matches, are
    masked."""
    timeline = await episodes.timelines.of(caller.owner, episode_id)
    return Response(timeline, media_type="application/json")


@router.get("/pictures/{digest}", responses=answer_of(w.PictureContent))
async def get_picture(
    digest: Annotated[str, Path(pattern="^[0-9a-f]{64}$")], episodes: EpisodesNow, caller: Trainer
) -> Response:
    """A picture that trajectories name, as a PNG file of the pixels that the model read."""
    content = await asyncio.to_thread(_picture, episodes.pictures, caller.owner, digest)
    if content is None:
        raise Refusal(404, f"picture {digest[:12]} is not kept here any more (limits.max_kept_picture_bytes)")
    return json_response(content)


def _picture(cache: PictureCache, owner: str, digest: str) -> w.PictureContent | None:
    picture = cache.find(owner, digest)
    return None if picture is None else w.PictureContent(digest, picture.png())
