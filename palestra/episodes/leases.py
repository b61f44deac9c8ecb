"""Leases: claims, heartbeats, releases and ends, all fenced by the attempt.

Each lease of an episode is its next attempt, and every call of a player names the attempt that it belongs to:

claim       queued -> leased, attempt + 1. The same claim_id again: the same leases, for as long as one of them is open.
heartbeat   expires_at = now + lease_s, if the attempt is the newest one and leased; else why it is not.
expiry      leased -> queued after a pause, or parked after too many; a release does the same. See `attempt_losses`.
end         leased -> ended with its result. The same result again is `repeated`, another one a `conflict`.

So two players may play an episode after a broken connection, but only the newest attempt can end it, and once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from palestra.episodes import groups, validation
from palestra.episodes.attempt_losses import lose
from palestra.episodes.board_events import RunHold
from palestra.episodes.errors import BoardError
from palestra.episodes.records import BoardEpisode, BoardRun
from palestra.episodes.state import BoardState
from palestra.types.episodes import (
    ClaimBlocker,
    ClaimRequest,
    EndAnswer,
    EndRequest,
    EndStatus,
    EpisodeState,
    HeartbeatAnswer,
    Lease,
    LeaseRef,
)

HELD_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class NoLease:
    """Why an attempt may not continue."""

    code: str
    """One of lease_lost, cancelled, stale_weights, deadline, unknown."""
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


def claim(state: BoardState, owner: str, request: ClaimRequest, full: Mapping[str, str], now: float) -> list[Lease]:
    validation.check_claim(request, state.limits)
    only = None if request.run is None else state.run(owner, request.run)
    key = owner, request.client_id, request.claim_id
    if kept := state.claims.leases_of(key):
        for episode in kept:
            state.renew(episode, now)
        return [_lease(episode, now) for episode in kept]
    if state.claims.is_over(key):
        raise BoardError(409, f"claim_id {request.claim_id!r}: all its leases have ended; use a new id for each claim")
    room = state.limits.max_open_leases - state.claims.lease_count(owner, request.client_id)
    if room <= 0:
        detail = f"client {request.client_id!r} holds {state.limits.max_open_leases} leases; end or release some first"
        raise BoardError(429, detail, retry_after_s=HELD_RETRY_S)
    episodes = _take(state, owner, only, request, full, min(request.max_n, room))
    for episode in episodes:
        _open(state, episode, request, now)
    return [_lease(episode, now) for episode in episodes]


def why_nothing(state: BoardState, owner: str, request: ClaimRequest, full: Mapping[str, str]) -> RunHold | None:
    """Returns why a claim got nothing, although something was queued. Among several runs, a client's used-up share
    comes first, because it concerns only this client and not other clients that wait."""
    if request.run is not None:
        return _hold(state.run(owner, request.run), request, full)
    first = None
    for run in state.waiting.get(owner, {}).values():
        hold = _hold(run, request, full) if run.queue.has(request.kind) else None
        if hold is not None and hold.code is ClaimBlocker.CLIENT_SHARE:
            return hold
        first = first or hold
    return first


def find(state: BoardState, owner: str, client_id: str | None, ref: LeaseRef | EndRequest) -> BoardEpisode | NoLease:
    """Returns the episode if the attempt is leased by this client."""
    episode = state.episodes.get(ref.episode_id)
    if episode is None or episode.run.owner != owner:
        stone = state.tombstones.find(ref.episode_id, owner)
        if stone is not None and (stone.attempt, stone.digest) == (ref.attempt, b""):
            return NoLease("cancelled", "its run was deleted")
        return NoLease("unknown", "no such episode; it may have been committed and deleted")
    if episode.state is EpisodeState.LEASED and episode.attempt == ref.attempt:
        if client_id is None or client_id == episode.client_id:
            return episode
        return NoLease("lease_lost", "another client holds it")
    return _why_not(episode, ref.attempt)


def beat(state: BoardState, owner: str, client_id: str | None, ref: LeaseRef, now: float) -> HeartbeatAnswer:
    found = find(state, owner, client_id, ref)
    if isinstance(found, NoLease):
        return _stop(ref, str(found))
    state.renew(found, now)
    return HeartbeatAnswer(
        episode_id=ref.episode_id, attempt=ref.attempt, can_continue=True, expires_at=now + found.lease_s
    )


def release(
    state: BoardState, owner: str, client_id: str | None, ref: LeaseRef, reason: str, now: float
) -> HeartbeatAnswer:
    found = find(state, owner, client_id, ref)
    if isinstance(found, NoLease):
        return _stop(ref, str(found))
    text = validation.clean_reason(reason) or "no reason given"
    lose(state, found, "released", text, now)
    return _stop(ref, f"lease_lost: released: {text}")


def end(state: BoardState, owner: str, client_id: str | None, request: EndRequest, now: float) -> EndAnswer:
    try:
        text = validation.result_text(request.result, state.limits)
    except validation.ResultInvalid as error:
        return _ended(request, EndStatus.INVALID, str(error))
    is_repeated = _is_repeated(state, owner, request, text)
    if is_repeated is not None:
        if is_repeated:
            return _ended(request, EndStatus.REPEATED)
        return _ended(request, EndStatus.CONFLICT, "this attempt has ended with another result, which stands")
    found = find(state, owner, client_id, request)
    if isinstance(found, NoLease):
        return _ended(request, _STATUS.get(found.code, EndStatus.LEASE_LOST), str(found))
    found.result, found.ended_at = text, now
    state.move(found, EpisodeState.ENDED)
    groups.settle(state, found.group, now)
    return _ended(request, EndStatus.ACCEPTED)


def _take(
    state: BoardState, owner: str, only: BoardRun | None, request: ClaimRequest, full: Mapping[str, str], most: int
) -> list[BoardEpisode]:
    kind = request.kind
    runs = list(state.waiting.get(owner, {}).values()) if only is None else [only]
    rooms = {run: room for run in runs if (room := _room(run, request, full)) > 0}
    if only is None:
        taken = state.shares.take(rooms, owner, kind, most)
    else:  # a client that plays for one run has chosen it: this does not change the order of the others
        taken, most = [], min(most, rooms.get(only, 0))
        while len(taken) < most and only.queue.has(kind):
            taken.append(only.queue.pop(kind, eval_first=only.settings.eval_first))
    for run in {episode.run for episode in taken}:
        state.forget_idle(run)
    return taken


def _room(run: BoardRun, request: ClaimRequest, full: Mapping[str, str]) -> int:
    """Returns how many episodes of the run may be given."""
    if not run.is_open or run.engine in full or not run.queue.has(request.kind):
        return 0
    return run.room_of(request.client_id)


def _hold(run: BoardRun, request: ClaimRequest, full: Mapping[str, str]) -> RunHold | None:
    if run.hold is not None:
        return run.hold
    if run.engine in full:
        return RunHold(ClaimBlocker.ENGINE_FULL, full[run.engine])
    client = request.client_id
    if run.queue.has(request.kind) and run.room_of(client) <= 0:
        text = f"client {client!r} holds {run.holders.get(client, 0)} of run {run.name!r}, all that its client_share"
        return RunHold(ClaimBlocker.CLIENT_SHARE, f"{text} of {run.settings.client_share:g} allows")
    return None


def _open(state: BoardState, episode: BoardEpisode, request: ClaimRequest, now: float) -> None:
    limits, run = state.limits, episode.run
    state.move(episode, EpisodeState.LEASED)
    episode.attempt += 1
    episode.client_id, episode.claim_id, episode.claimed_at = request.client_id, request.claim_id, now
    lease_s = run.settings.lease_s if request.lease_s is None else request.lease_s
    episode.lease_s = min(max(lease_s, limits.min_lease_s), limits.max_lease_s)
    episode.version, episode.oldest_version = run.version, None
    episode.calls = episode.sampled = 0
    state.open_lease(episode)
    state.renew(episode, now)


def _lease(episode: BoardEpisode, now: float) -> Lease:
    group, run = episode.group, episode.run
    return Lease(
        episode_id=episode.episode_id,
        attempt=episode.attempt,
        run=run.name,
        group_id=group.spec.group_id,
        index=episode.index,
        kind=group.spec.kind,
        task=group.spec.task,
        seed=episode.seed,
        tags=group.spec.tags,
        version=episode.version,
        expires_at=now + episode.lease_s,
        lease_s=episode.lease_s,
        deadline=group.deadline,
        base_url="",
        api_key="",
        model=run.model or "",
    )


def _is_repeated(state: BoardState, owner: str, request: EndRequest, text: str) -> bool | None:
    """Whether this attempt has ended with exactly this result, whatever has happened since. None: it has not ended."""
    episode = state.episodes.get(request.episode_id)
    if episode is None:
        stone = state.tombstones.find(request.episode_id, owner)
        if stone is None or stone.attempt != request.attempt or not stone.digest:
            return None
        return stone.digest == validation.digest(text)
    has_ended = episode.run.owner == owner and episode.attempt == request.attempt and episode.result is not None
    return episode.result == text if has_ended else None


def _why_not(episode: BoardEpisode, attempt: int) -> NoLease:
    loss = next((loss for loss in episode.losses if loss.attempt == attempt), None)
    if loss is not None:
        code, _, text = loss.reason.partition(": ")
        return NoLease(code, text) if code in _STATUS else NoLease("lease_lost", loss.reason)
    if attempt > episode.attempt:
        return NoLease("lease_lost", f"attempt {attempt} was never leased; the newest is {episode.attempt}")
    if attempt == episode.attempt and episode.result is not None:
        return NoLease("lease_lost", "this attempt has ended")
    return NoLease("lease_lost", f"the newest attempt is {episode.attempt}")


_STATUS = {
    "unknown": EndStatus.UNKNOWN,
    "cancelled": EndStatus.CANCELLED,
    "stale_weights": EndStatus.STALE,
    "deadline": EndStatus.LEASE_LOST,
}


def _stop(ref: LeaseRef, reason: str) -> HeartbeatAnswer:
    return HeartbeatAnswer(episode_id=ref.episode_id, attempt=ref.attempt, can_continue=False, reason=reason)


def _ended(request: EndRequest, status: EndStatus, detail: str = "") -> EndAnswer:
    return EndAnswer(episode_id=request.episode_id, attempt=request.attempt, status=status, detail=detail)
