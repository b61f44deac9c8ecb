"""The calls of the episode API as values: path, body, and type of the answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import msgspec

from palestra.types import episode_wire as w
from palestra.types.episodes import (
    ClaimRequest,
    EndRequest,
    EpisodeInfo,
    EpisodeState,
    LeaseRef,
    NewGroup,
    RunInfo,
    RunSettings,
)
from palestra.types.timelines import EpisodeTimeline

T = TypeVar("T")

ROOT = "/episodes/v1"
TIMEOUT_S = 30.0
BATCH = 256
"""Maximum number of groups, leases or ends in one request."""
BATCH_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[T]):
    method: str
    path: str
    answer: type[T]
    body: object = None
    query: Mapping[str, object] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S


def health(timeout_s: float) -> ApiCall[dict[str, str]]:
    """The health route, which any server of the Tinker API has."""
    return ApiCall("GET", "/api/v1/healthz", dict[str, str], timeout_s=timeout_s)


# For players


def claim(request: ClaimRequest) -> ApiCall[w.Claimed]:
    return ApiCall("POST", f"{ROOT}/claim", w.Claimed, request, timeout_s=request.wait_s + TIMEOUT_S)


def heartbeat(client_id: str, leases: Sequence[LeaseRef], timeout_s: float = TIMEOUT_S) -> ApiCall[w.HeartbeatAnswers]:
    body = w.HeartbeatRequest(client_id=client_id, leases=list(leases))
    return ApiCall("POST", f"{ROOT}/heartbeat", w.HeartbeatAnswers, body, timeout_s=timeout_s)


def end(client_id: str, ends: Sequence[EndRequest]) -> ApiCall[w.EndedEpisodes]:
    return ApiCall("POST", f"{ROOT}/end", w.EndedEpisodes, w.EndRequests(client_id=client_id, ends=list(ends)))


def release(client_id: str, leases: Sequence[LeaseRef], reason: str) -> ApiCall[w.HeartbeatAnswers]:
    body = w.Release(client_id=client_id, leases=list(leases), reason=reason)
    return ApiCall("POST", f"{ROOT}/release", w.HeartbeatAnswers, body)


# For trainers


def put_run(run: str, settings: RunSettings | None, model: str | None) -> ApiCall[RunInfo]:
    return ApiCall("PUT", _run(run), RunInfo, w.PutRun(settings=settings, model=model))


def delete_run(run: str) -> ApiCall[w.RunDeleted]:
    return ApiCall("DELETE", _run(run), w.RunDeleted)


def get_run(run: str) -> ApiCall[RunInfo]:
    return ApiCall("GET", _run(run), RunInfo)


def get_runs() -> ApiCall[w.Runs]:
    return ApiCall("GET", f"{ROOT}/runs", w.Runs)


def register(run: str, groups: Sequence[NewGroup]) -> ApiCall[w.RegisteredGroups]:
    return ApiCall("POST", f"{_run(run)}/groups", w.RegisteredGroups, w.NewGroups(groups=list(groups)))


def played_groups(
    run: str, after: int, *, limit: int, wait_s: float, version: int | None, tokens: bool
) -> ApiCall[w.PlayedGroups]:
    params = {"after": after, "limit": limit, "wait_s": wait_s, "tokens": str(tokens).lower()}
    query = params if version is None else {**params, "version": version}
    return ApiCall("GET", f"{_run(run)}/groups", w.PlayedGroups, query=query, timeout_s=wait_s + TIMEOUT_S)


def commit(run: str, cursor: int) -> ApiCall[RunInfo]:
    return ApiCall("POST", f"{_run(run)}/commit", RunInfo, w.Commit(cursor=cursor))


def publish(run: str, version: int, model: str) -> ApiCall[RunInfo]:
    return ApiCall("POST", f"{_run(run)}/weights", RunInfo, w.Weights(version=version, model=model))


def pause(run: str) -> ApiCall[RunInfo]:
    return ApiCall("POST", f"{_run(run)}/pause", RunInfo, w.Empty())


def resume(run: str) -> ApiCall[RunInfo]:
    return ApiCall("POST", f"{_run(run)}/resume", RunInfo, w.Empty())


def cancel(
    run: str, episode_ids: Sequence[str] | None, group_ids: Sequence[str] | None, reason: str
) -> ApiCall[w.Cancelled]:
    body = w.Cancel(run=run, episode_ids=list(episode_ids or ()), group_ids=list(group_ids or ()), reason=reason)
    return ApiCall("POST", f"{ROOT}/cancel", w.Cancelled, body)


def requeue(episode_ids: Sequence[str]) -> ApiCall[w.Requeued]:
    return ApiCall("POST", f"{ROOT}/requeue", w.Requeued, w.Requeue(episode_ids=list(episode_ids)))


def get_episode(episode_id: str) -> ApiCall[EpisodeInfo]:
    return ApiCall("GET", f"{ROOT}/episodes/{quote(episode_id, safe='')}", EpisodeInfo)


def get_timeline(episode_id: str) -> ApiCall[EpisodeTimeline]:
    return ApiCall("GET", f"{ROOT}/episodes/{quote(episode_id, safe='')}/timeline", EpisodeTimeline)


def get_picture(digest: str) -> ApiCall[w.PictureContent]:
    return ApiCall("GET", f"{ROOT}/pictures/{quote(digest, safe='')}", w.PictureContent)


class EpisodeFilter(TypedDict, total=False):
    """Which episodes are listed."""

    reward_min: float | None
    """Only episodes with at least this reward."""
    reward_below: float | None
    error: str | None
    """Text in the error, or in the reason for parking or cancelling; empty: any error."""
    task: str | None
    """Text in the task."""


def list_episodes(
    run: str | None = None,
    state: EpisodeState | str | None = None,
    *,
    limit: int = 100,
    offset: int = 0,
    **which: Unpack[EpisodeFilter],
) -> ApiCall[w.EpisodePage]:
    query = {**_meant(run, state, which), "limit": limit, "offset": offset}
    return ApiCall("GET", f"{ROOT}/episodes", w.EpisodePage, query=query)


def export_episodes(
    run: str | None, state: EpisodeState | str | None, limit: int | None, which: EpisodeFilter
) -> ApiCall[EpisodeTimeline]:
    """Timelines of episodes, answered line by line."""
    bound = {} if limit is None else {"limit": limit}
    query = {**_meant(run, state, which), **bound, "format": "jsonl"}
    return ApiCall("GET", f"{ROOT}/episodes", EpisodeTimeline, query=query)


def _meant(run: str | None, state: EpisodeState | str | None, which: EpisodeFilter) -> dict[str, object]:
    named = {"run": run, "state": None if state is None else str(EpisodeState(state)), **which}
    return {name: value for name, value in named.items() if value is not None}


def batches(items: Sequence[T]) -> Iterator[list[T]]:
    """Splits items into requests of a bounded size, since tasks and results may be large."""
    batch: list[T] = []
    size = 0
    for item in items:
        item_size = len(msgspec.json.encode(item))
        if batch and (len(batch) == BATCH or size + item_size > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item_size
    if batch:
        yield batch


def _run(run: str) -> str:
    return f"{ROOT}/runs/{quote(run, safe='')}"
