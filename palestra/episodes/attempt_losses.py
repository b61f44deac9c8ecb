"""Lost attempts: they are queued again after a pause, or parked; and weights that are too old."""

from __future__ import annotations

from palestra.episodes import groups
from palestra.episodes.records import BoardEpisode, BoardGroup, BoardRun
from palestra.episodes.state import PLAYING, BoardState
from palestra.types.episodes import EpisodeState, WeightPolicy
from palestra.util.backoff import Backoff

STRIKES = ("expired",)
"""Losses that the episode itself may have caused. One that was released by choice, or whose weights became stale, is
not to blame."""
WAITS = (*STRIKES, "released")
"""Losses that are followed by a pause: a player that releases at once and claims again would loop without a pause."""


def lose(state: BoardState, episode: BoardEpisode, code: str, reason: str, now: float) -> None:
    """Ends the attempt of a leased episode as lost."""
    state.note_loss(episode, f"{code}: {reason}", now)
    episode.lost += 1
    if code in STRIKES:
        episode.strikes += 1
    if episode.strikes >= episode.group.max_attempts or episode.lost >= state.limits.max_losses:
        state.move(episode, EpisodeState.PARKED)
        groups.settle(state, episode.group, now)
        return
    backoff = Backoff(episode.run.settings.backoff_s, state.limits.max_backoff_s)
    episode.not_before = now + backoff.after(episode.strikes) if code in WAITS else 0.0
    state.move(episode, EpisodeState.QUEUED)
    state.queue(episode, now)


def lose_stale(state: BoardState, run: BoardRun, now: float) -> None:
    """Ends open leases whose weights are older than the policy allows, in the order of registration."""
    for episode in sorted(run.leased.values(), key=lambda episode: (episode.group.serial, episode.index)):
        # Parking one episode may end its group, and with it the leases of the others.
        if episode.state is EpisodeState.LEASED and is_stale(run, episode, run.version):
            lose(state, episode, "stale_weights", stale_reason(run, episode, run.version), now)


def deadline_passed(state: BoardState, group: BoardGroup, now: float) -> None:
    """Parks the members of an open group that have not ended when its deadline passes."""
    reason = f"the group's deadline of {group.spec.deadline_s:g} s has passed"
    for episode in group.members:
        if episode.state in PLAYING:
            state.note_loss(episode, f"deadline: {reason}", now)
            state.move(episode, EpisodeState.PARKED)
    groups.settle(state, group, now, why="deadline", can_replace=False)


def allowed_lag(run: BoardRun) -> int | None:
    """Returns how many versions the weights may be behind; None: any number."""
    match run.settings.weight_policy:
        case WeightPolicy.FINISH:
            return None
        case WeightPolicy.LAG:
            return run.settings.max_lag
        case WeightPolicy.DROP:
            return 0


def is_stale(run: BoardRun, episode: BoardEpisode, version: int) -> bool:
    """Whether the episode's weights are too old; an episode without model calls has none."""
    lag = allowed_lag(run)
    return lag is not None and episode.oldest_version is not None and version - episode.oldest_version > lag


def stale_reason(run: BoardRun, episode: BoardEpisode, version: int) -> str:
    return (
        f"a call was answered by version {episode.oldest_version}, the newest is {version},"
        f" and run {run.name} allows {allowed_lag(run)} between them"
    )
