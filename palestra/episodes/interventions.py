"""Interventions by a person or a trainer: cancelling and requeueing single episodes."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.episodes import groups, validation
from palestra.episodes.errors import BoardError
from palestra.episodes.records import BoardEpisode, BoardGroup, BoardRun
from palestra.episodes.state import PLAYING, BoardState
from palestra.types.episodes import EpisodeState, GroupState

S = EpisodeState


def chosen(
    state: BoardState, run: BoardRun, episode_ids: Sequence[str], group_ids: Sequence[str]
) -> tuple[list[BoardGroup], list[BoardEpisode]]:
    """Returns the episodes and groups, each once. 404 if one is unknown."""
    named = [_group(run, group_id) for group_id in dict.fromkeys(group_ids)]
    return named, [_episode(state, run, episode_id) for episode_id in dict.fromkeys(episode_ids)]


def cancel_group(state: BoardState, group: BoardGroup, reason: str, now: float) -> int:
    """Cancels the episodes of a group and returns their number. A group that is over, or was deleted meanwhile, does
    not change."""
    if group.state is not GroupState.OPEN:
        return 0
    why = _reason_text(reason)
    members = [member for member in group.members if member.state in (*PLAYING, S.PARKED)]
    count = sum([_cancel(state, member, why, now) for member in members])
    groups.drop(state, group, f"cancelled: {why}", now)
    return count


def cancel_episodes(state: BoardState, episodes: Sequence[BoardEpisode], reason: str, now: float) -> int:
    why, known = _reason_text(reason), [episode for episode in episodes if episode.episode_id in state.episodes]
    count = sum([_cancel(state, episode, why, now) for episode in known])
    for group in {episode.group: None for episode in known}:
        groups.settle(state, group, now, why="cancelled")
    return count


def requeue(state: BoardState, owner: str, episode_ids: Sequence[str], now: float) -> int:
    episodes = [state.episode(owner, episode_id) for episode_id in dict.fromkeys(episode_ids)]
    for episode in episodes:
        if episode.state is not S.PARKED or episode.group.state is not GroupState.OPEN:
            raise BoardError(
                409,
                f"episode {episode.episode_id} is {episode.state} and its group {episode.group.state}:"
                " only parked episodes of open groups can be queued again; register another group",
            )
    for episode in episodes:
        episode.strikes = episode.lost = 0
        episode.not_before = now  # its waiting time counts from here
        state.move(episode, S.QUEUED)
        state.queue(episode, now)
    return len(episodes)


def _reason_text(reason: str) -> str:
    return validation.clean_reason(reason) or "by its trainer"


def _cancel(state: BoardState, episode: BoardEpisode, why: str, now: float) -> bool:
    """Cancels an episode; returns whether there was anything left to cancel."""
    if episode.state in (S.ENDED, S.CANCELLED):
        return False
    groups.cancel(state, episode, why, now)
    return True


def _group(run: BoardRun, group_id: str) -> BoardGroup:
    group = run.groups.get(group_id)
    if group is None:
        raise BoardError(
            404, f"no group {group_id[:128]!r} in run {run.name!r}; it may have been committed and deleted"
        )
    return group


def _episode(state: BoardState, run: BoardRun, episode_id: str) -> BoardEpisode:
    episode = state.episode(run.owner, episode_id)
    if episode.run is not run:
        raise BoardError(404, f"no episode {episode_id!r} in run {run.name!r}; it belongs to {episode.run.name!r}")
    return episode
