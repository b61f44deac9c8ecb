"""Deletes a run with all its episodes.

Owns: what is remembered of it afterwards. Never touches: traces of its calls, which are purged like all others.
"""

from __future__ import annotations

from palestra.episodes import groups
from palestra.episodes.delivery import forget
from palestra.episodes.state import PLAYING, BoardState
from palestra.types.episodes import EpisodeState, GroupState

WHY = "its run was deleted"


def delete(state: BoardState, owner: str, name: str, now: float) -> int:
    """Deletes a run and returns the number of its episodes. A repeated end of an episode is still recognised, and
    players are informed."""
    run = state.runs.get(owner, {}).get(name)
    if run is None:
        return 0
    count = sum(run.counts.values())
    for group in list(run.groups.values()):
        if group.state is GroupState.OPEN:
            group.state = GroupState.DROPPED  # so that its deadline has no effect any more
        for episode in group.members:
            if episode.state is EpisodeState.LEASED:
                state.tombstones.put_cancelled(episode.episode_id, owner, episode.attempt, now)
            if episode.state in PLAYING:
                groups.cancel(state, episode, WHY, now)
        forget(state, group, now)
    groups.forget_staged(state, run)
    del state.runs[owner][name]
    state.outbox.run(run, is_gone=True)
    state.news.delivered.discard((owner, name))
    state.news.deleted.add((owner, name))
    state.news.claimable.add(owner)  # claims that wait for this run must be answered
    return count
