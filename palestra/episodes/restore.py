"""Restores the board from saved rows."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from palestra.episodes.records import BoardEpisode, BoardGroup, BoardRun
from palestra.episodes.state import BoardState
from palestra.types.episode_rows import EpisodeRow, GroupRow, RunRow, SavedRows
from palestra.types.episodes import EpisodeState, LeaseRef, NewGroup

_spec = msgspec.json.Decoder(NewGroup)


def fill(state: BoardState, saved: SavedRows, open_calls: Mapping[LeaseRef, int], now: float) -> None:
    """Fills an empty board. The order of the rows does not matter."""
    for row in saved.runs:
        state.runs.setdefault(row.owner, {})[row.run] = _run(row, state.tag(row.owner, row.run, row.created_at))
    for row in sorted(saved.groups, key=lambda row: row.serial):
        run = state.runs[row.owner][row.run]
        if row.serial < run.registered or not run.is_staging:
            _add_group(state, run, row)
        else:  # part of a registration that was not finished
            state.outbox.forget(row)
    for row in sorted(saved.episodes, key=lambda row: row.index):
        if row.group_id in state.runs[row.owner][row.run].groups:
            _add_episode(state, row, open_calls, now)
        else:
            state.outbox.forget(row)
    for row in saved.runs:
        if row.is_staging:
            run = state.runs[row.owner][row.run]
            run.is_staging = False
            state.outbox.run(run)
    state.tombstones.restore(saved.tombstones)


def _run(row: RunRow, tag: str) -> BoardRun:
    run = BoardRun(
        owner=row.owner,
        name=row.run,
        tag=tag,
        settings=row.settings,
        model=row.model,
        created_at=row.created_at,
        version=row.version,
        is_paused=row.is_paused,
        committed=row.committed,
        delivered=row.delivered,
        registered=row.registered,
        is_staging=row.is_staging,
    )
    run.queue.weigh(row.settings.environment_weights)
    return run


def _add_group(state: BoardState, run: BoardRun, row: GroupRow) -> None:
    run.registered = max(run.registered, row.serial + 1)
    group = BoardGroup(
        run=run,
        spec=_spec.decode(row.spec),
        text=row.spec,
        serial=row.serial,
        created_at=row.created_at,
        state=row.state,
        reason=row.reason,
        number=row.number,
        made=row.made,
    )
    run.groups[row.group_id] = group
    if group.number is None:
        state.timers.watch_deadline(group)
    else:
        run.log[group.number] = group
        run.delivered = max(run.delivered, group.number)


def _add_episode(state: BoardState, row: EpisodeRow, open_calls: Mapping[LeaseRef, int], now: float) -> None:
    run = state.runs[row.owner][row.run]
    episode = BoardEpisode(
        episode_id=row.episode_id,
        run=run,
        group=run.groups[row.group_id],
        index=row.index,
        seed=row.seed,
        created_at=row.created_at,
        state=row.state,
        attempt=row.attempt,
        strikes=row.strikes,
        lost=row.lost,
        # Never longer than a back-off: the system's clock may have been set back since.
        not_before=min(row.not_before, now + state.limits.max_backoff_s),
        client_id=row.client_id,
        claim_id=row.claim_id,
        claimed_at=row.claimed_at,
        lease_s=row.lease_s,
        ended_at=row.ended_at,
        version=row.version,
        oldest_version=row.oldest_version,
        calls=row.calls,
        sampled=row.sampled,
        losses=row.losses,
        result=row.result,
    )
    state.add(episode)
    if episode.state is EpisodeState.QUEUED:
        state.queue(episode, now)
    elif episode.state is EpisodeState.LEASED:
        episode.open_calls = open_calls.get(episode.ref, 0)
        state.open_lease(episode)
        # No client could send a heartbeat while there was no board, so the lease starts again.
        state.renew(episode, now)
