"""The episode buffer, as AgentJet's clients call it: waiting and running episodes."""

from __future__ import annotations

from palestra.episodes.board import EpisodeBoard
from palestra.server.agentjet.names import ADDRESS, uuid_of
from palestra.server.core.owners.callers import EPISODE_PREFIX
from palestra.types.episodes import EpisodeInfo, EpisodeState
from palestra.types.tinkerscript import EpisodeBuffer, EpisodeStatus

MASKED = f"{EPISODE_PREFIX}****"


def buffer_of(board: EpisodeBoard, owner: str, holders: str | None, limit: int) -> EpisodeBuffer:
    """Returns the buffer. `holders` is a prefix of the names of clients whose episodes may be shown; None: those of all
    clients, and waiting episodes, too."""
    played = board.episodes(owner, state=EpisodeState.LEASED, limit=limit if holders is None else ALL)
    if holders is not None:
        mine = [one for one in played.episodes if one.client_id.startswith(holders)]
        return EpisodeBuffer(buffer=[_shown(one, len(holders)) for one in mine[:limit]], total=len(mine))
    waiting = board.episodes(owner, state=EpisodeState.QUEUED, limit=limit - len(played.episodes))
    found = [*played.episodes, *waiting.episodes]
    return EpisodeBuffer(buffer=[_shown(one, 0) for one in found], total=played.total + waiting.total)


ALL = 1 << 40


def _shown(episode: EpisodeInfo, cut: int) -> EpisodeStatus:
    is_played = episode.state is EpisodeState.LEASED
    return EpisodeStatus(
        episode_uuid=uuid_of(episode),
        episode_status="claimed" if is_played else "registered",
        episode_type=episode.kind,
        openai_api_key=MASKED if is_played else "",
        client_uuid=episode.client_id[cut:],
        zmq_listen_result_addr=episode.tags.get(ADDRESS, ""),
        latest_activity_timestamp=_last_activity(episode),
        allow_discard_timeout=episode.lease_s if is_played else -1.0,
    )


def _last_activity(episode: EpisodeInfo) -> float:
    """Returns when the lease was last renewed; if it does not age now, when it was claimed."""
    if episode.expires_at is not None:
        return episode.expires_at - episode.lease_s
    return episode.claimed_at or episode.created_at
