"""The episode API call by call, as values: what to send where, and what comes back.

Owns: paths, bodies, the shapes of answers. Never touches: sending.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import msgspec
from msgspec import Struct

from palestra.types.episodes import (
    Beat,
    ClaimRequest,
    Ended,
    EndRequest,
    EpisodeInfo,
    EpisodeState,
    Lease,
    LeaseRef,
    NewGroup,
    PlayedGroup,
    Registered,
    RunInfo,
    RunSettings,
)
from palestra.types.readiness import make_ready
from palestra.types.timelines import EpisodeTimeline

T = TypeVar("T")

ROOT = "/episodes/v1"
TIMEOUT_S = 30.0
BATCH = 256
"""Groups, leases or ends of one request."""
BATCH_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    method: str
    path: str
    answer: type[T]
    body: object = None
    query: Mapping[str, object] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S


class Health(Struct, frozen=True, kw_only=True):
    status: str


class Claimed(Struct, frozen=True, kw_only=True):
    leases: list[Lease]
    retry_after_s: float | None = None


class Beats(Struct, frozen=True, kw_only=True):
    beats: list[Beat]


class EndedAll(Struct, frozen=True, kw_only=True):
    ended: list[Ended]


class RegisteredGroups(Struct, frozen=True, kw_only=True):
    groups: list[Registered]


class PlayedGroups(Struct, frozen=True, kw_only=True):
    groups: list[PlayedGroup]
    cursor: int


class RunList(Struct, frozen=True, kw_only=True):
    runs: list[RunInfo]


class EpisodeList(Struct, frozen=True, kw_only=True):
    episodes: list[EpisodeInfo]
    total: int


class CancelCount(Struct, frozen=True, kw_only=True):
    cancelled: int


class DeleteCount(Struct, frozen=True, kw_only=True):
    deleted: int


class RequeueCount(Struct, frozen=True, kw_only=True):
    requeued: int


make_ready(__name__)


def health(timeout_s: float) -> Call[Health]:
    """Any server of the Tinker API has it."""
    return Call("GET", "/api/v1/healthz", Health, timeout_s=timeout_s)


# For players


def claim(request: ClaimRequest) -> Call[Claimed]:
    return Call("POST", f"{ROOT}/claim", Claimed, request, timeout_s=request.wait_s + TIMEOUT_S)


def heartbeat(client_id: str, leases: Sequence[LeaseRef], timeout_s: float = TIMEOUT_S) -> Call[Beats]:
    return Call(
        "POST", f"{ROOT}/heartbeat", Beats, {"client_id": client_id, "leases": list(leases)}, timeout_s=timeout_s
    )


def end(client_id: str, ends: Sequence[EndRequest]) -> Call[EndedAll]:
    return Call("POST", f"{ROOT}/end", EndedAll, {"client_id": client_id, "ends": list(ends)})


def release(client_id: str, leases: Sequence[LeaseRef], reason: str) -> Call[Beats]:
    body = {"client_id": client_id, "leases": list(leases), "reason": reason}
    return Call("POST", f"{ROOT}/release", Beats, body)


# For trainers


def put_run(run: str, settings: RunSettings | None, model: str | None) -> Call[RunInfo]:
    given = {"settings": settings, "model": model}
    return Call("PUT", _run(run), RunInfo, {name: value for name, value in given.items() if value is not None})


def delete_run(run: str) -> Call[DeleteCount]:
    return Call("DELETE", _run(run), DeleteCount)


def get_run(run: str) -> Call[RunInfo]:
    return Call("GET", _run(run), RunInfo)


def get_runs() -> Call[RunList]:
    return Call("GET", f"{ROOT}/runs", RunList)


def register(run: str, groups: Sequence[NewGroup]) -> Call[RegisteredGroups]:
    return Call("POST", f"{_run(run)}/groups", RegisteredGroups, {"groups": list(groups)})


def played_groups(
    run: str, after: int, *, limit: int, wait_s: float, version: int | None, tokens: bool
) -> Call[PlayedGroups]:
    asked = {"after": after, "limit": limit, "wait_s": wait_s, "tokens": str(tokens).lower()}
    query = asked if version is None else {**asked, "version": version}
    return Call("GET", f"{_run(run)}/groups", PlayedGroups, query=query, timeout_s=wait_s + TIMEOUT_S)


def commit(run: str, cursor: int) -> Call[RunInfo]:
    return Call("POST", f"{_run(run)}/commit", RunInfo, {"cursor": cursor})


def publish(run: str, version: int, model: str) -> Call[RunInfo]:
    return Call("POST", f"{_run(run)}/weights", RunInfo, {"version": version, "model": model})


def pause(run: str) -> Call[RunInfo]:
    return Call("POST", f"{_run(run)}/pause", RunInfo, {})


def resume(run: str) -> Call[RunInfo]:
    return Call("POST", f"{_run(run)}/resume", RunInfo, {})


def cancel(
    run: str, episode_ids: Sequence[str] | None, group_ids: Sequence[str] | None, reason: str
) -> Call[CancelCount]:
    named = {"episode_ids": episode_ids, "group_ids": group_ids}
    body = {"run": run, "reason": reason} | {name: list(ids) for name, ids in named.items() if ids is not None}
    return Call("POST", f"{ROOT}/cancel", CancelCount, body)


def requeue(episode_ids: Sequence[str]) -> Call[RequeueCount]:
    return Call("POST", f"{ROOT}/requeue", RequeueCount, {"episode_ids": list(episode_ids)})


def get_episode(episode_id: str) -> Call[EpisodeInfo]:
    return Call("GET", f"{ROOT}/episodes/{quote(episode_id, safe='')}", EpisodeInfo)


def get_timeline(episode_id: str) -> Call[EpisodeTimeline]:
    return Call("GET", f"{ROOT}/episodes/{quote(episode_id, safe='')}/timeline", EpisodeTimeline)


class Which(TypedDict, total=False):
    """Of the episodes that are listed."""

    reward_min: float | None
    """That much, or more."""
    reward_below: float | None
    error: str | None
    """A text in the error it ended with, or in why it was parked or cancelled; empty: any."""
    task: str | None
    """A text in its task."""


def list_episodes(
    run: str | None = None,
    state: EpisodeState | str | None = None,
    *,
    limit: int = 100,
    offset: int = 0,
    **which: Unpack[Which],
) -> Call[EpisodeList]:
    query = {**_meant(run, state, which), "limit": limit, "offset": offset}
    return Call("GET", f"{ROOT}/episodes", EpisodeList, query=query)


def export_episodes(
    run: str | None, state: EpisodeState | str | None, limit: int | None, which: Which
) -> Call[EpisodeTimeline]:
    """Answered line by line."""
    bound = {} if limit is None else {"limit": limit}
    query = {**_meant(run, state, which), **bound, "format": "jsonl"}
    return Call("GET", f"{ROOT}/episodes", EpisodeTimeline, query=query)


def _meant(run: str | None, state: EpisodeState | str | None, which: Which) -> dict[str, object]:
    named = {"run": run, "state": None if state is None else str(EpisodeState(state)), **which}
    return {name: value for name, value in named.items() if value is not None}


def batches(items: Sequence[T]) -> Iterator[list[T]]:
    """As many as go into one request: tasks and results may be large."""
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
