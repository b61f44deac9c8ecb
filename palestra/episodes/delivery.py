"""Delivery: complete groups in a numbered log of their run, read by a cursor, deleted when it is committed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from palestra.episodes import validation
from palestra.episodes.attempt_losses import is_stale, stale_reason
from palestra.episodes.errors import BoardError
from palestra.episodes.groups import tombstone_name
from palestra.episodes.records import BoardGroup, BoardRun
from palestra.episodes.state import BoardState
from palestra.types.episodes import (
    EpisodeKind,
    EpisodeState,
    GroupState,
    OnLoss,
    PlayedEpisode,
    PlayedGroup,
)


def read(
    state: BoardState, run: BoardRun, after: int, limit: int, version: int | None, now: float
) -> list[PlayedGroup]:
    if after < run.committed:
        detail = f"after={after}: groups up to {run.committed} are committed and deleted; read from there"
        raise BoardError(410, detail)
    check_known(run, "after", after)
    left = (run.log[number] for number in range(after + 1, run.delivered + 1) if number in run.log)
    groups = list(islice(left, limit))
    if version is not None:
        for group in groups:
            _leave_out_stale(state, group, version, now)
    return [_played(group) for group in groups]


def commit(state: BoardState, run: BoardRun, cursor: int, now: float) -> None:
    if cursor <= run.committed:
        return
    check_known(run, "cursor", cursor)
    _forget_all(state, run, range(run.committed + 1, cursor + 1), cursor, now)


def commit_one(state: BoardState, run: BoardRun, number: int, now: float) -> None:
    """Commits one group; those before it stay. The cursor advances as far as no group is left."""
    if number not in run.log:
        return
    cursor = run.committed
    while cursor < run.delivered and (cursor + 1 == number or cursor + 1 not in run.log):
        cursor += 1
    _forget_all(state, run, [number], cursor, now)


def _forget_all(state: BoardState, run: BoardRun, numbers: Iterable[int], cursor: int, now: float) -> None:
    was_open = run.is_open
    for number in numbers:
        if number in run.log:  # it may have been committed by itself
            forget(state, run.log.pop(number), now)
    run.committed = cursor
    state.outbox.run(run)
    if run.is_open and not was_open:
        state.news.claimable.add(run.owner)


def check_known(run: BoardRun, what: str, number: int) -> None:
    if number > run.delivered:
        newest = f"the newest group of run {run.name!r} is {run.delivered}"
        raise BoardError(409, f"{what}={number}: {newest}; is it the cursor of another run, or of another database?")


def _leave_out_stale(state: BoardState, group: BoardGroup, version: int, now: float) -> None:
    """Parks the stale members of a group. Evaluations are kept: they say how good those weights were."""
    if group.state is not GroupState.READY or group.spec.kind is EpisodeKind.EVAL:
        return
    for episode in group.members:
        if episode.state is EpisodeState.ENDED and is_stale(group.run, episode, version):
            state.note_loss(episode, f"stale_weights: {stale_reason(group.run, episode, version)}", now)
            state.move(episode, EpisodeState.PARKED)
            state.outbox.group(group)
    least = group.min_size if group.spec.on_loss is OnLoss.SHRINK else group.spec.size
    if group.ended < least:
        group.state = GroupState.DROPPED
        group.reason = (
            f"stale_weights: for version {version} only {group.ended} episodes are new enough, "
            f"but the group needs {least}"
        )


def _played(group: BoardGroup) -> PlayedGroup:
    assert group.number is not None
    ended = [member for member in group.members if member.state is EpisodeState.ENDED]
    return PlayedGroup(
        number=group.number,
        group_id=group.spec.group_id,
        task=group.spec.task,
        kind=group.spec.kind,
        state=group.state,
        reason=group.reason,
        episodes=[PlayedEpisode(info=member.info(), trajectories=[]) for member in ended],
        tags=group.spec.tags,
    )


def forget(state: BoardState, group: BoardGroup, now: float) -> None:
    """Deletes a group, except for what is needed to recognise a repeated request."""
    run = group.run
    for episode in group.members:
        if episode.result is not None:
            digest = validation.digest(episode.result)
            state.tombstones.put(episode.episode_id, run.owner, episode.attempt, digest, now)
    digest = validation.digest(group.text)
    state.tombstones.put(tombstone_name(run, group.spec.group_id), run.owner, -group.serial, digest, now)
    state.remove(group)
