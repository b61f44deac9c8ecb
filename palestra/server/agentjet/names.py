"""Names of attempts in TinkerScript: one name contains the episode and the number of its attempt, so that no lease id
is needed.

AgentJet's clients share one `client_uuid` between their threads and send nothing but the episode's name. The name of
the first attempt is the episode's own, later ones end with their number: so a thread that lost its attempt cannot end
the one that another thread of the same client plays now.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from palestra.episodes.board import EpisodeBoard
from palestra.episodes.errors import BoardError
from palestra.server.core.errors import Refusal
from palestra.types.episodes import EpisodeInfo, Lease, LeaseRef

RUN = "tinkerscript"
"""The run of episodes that a trainer registers one by one, under its own names."""
ADDRESS = "zmq_listen_result_addr"
"""The tag of such an episode: the address for its result. It may be empty, but it exists."""

MARK = "#"
_NUMBERED = re.compile(r"(?P<name>.+)#(?P<number>[1-9][0-9]{0,8})")


def uuid_of(episode: Lease | EpisodeInfo) -> str:
    """Returns the name of the episode's present attempt."""
    name = own_name(episode.run, episode.group_id, episode.tags) or episode.episode_id
    return name if episode.attempt <= 1 else f"{name}{MARK}{episode.attempt}"


def own_name(run: str, group_id: str, tags: Mapping[str, str]) -> str | None:
    """Returns the name that its trainer gave it."""
    return group_id if run == RUN and ADDRESS in tags else None


def lease_id_of(lease: Lease) -> str:
    return f"{lease.episode_id}{MARK}{lease.attempt}"


def lease_of(board: EpisodeBoard, owner: str, episode_uuid: str, lease_id: str | None) -> LeaseRef:
    """Returns which attempt is meant. Whether it exists, and who holds it, is checked by the board."""
    named = _split(episode_uuid)
    if lease_id is None:
        own = board.first_member(owner, RUN, named.episode_id)  # this also works after delivery: an end may be repeated
        return named if own is None else LeaseRef(episode_id=own, attempt=named.attempt)
    shown = _split(lease_id)
    try:
        episode = board.find(owner, shown.episode_id)
    except BoardError:
        return shown  # perhaps it is committed; then the name that its trainer gave it is forgotten
    name = own_name(episode.run, episode.group_id, episode.tags) or episode.episode_id
    if named != LeaseRef(episode_id=name, attempt=shown.attempt):
        raise Refusal(
            400,
            f"lease_id: {lease_id[:80]!r} does not belong to {episode_uuid[:80]!r}; send "
            "both as the claim returned them",
        )
    return shown


def _split(name: str) -> LeaseRef:
    numbered = _NUMBERED.fullmatch(name)
    if numbered is None:
        return LeaseRef(episode_id=name, attempt=1)
    return LeaseRef(episode_id=numbered["name"], attempt=int(numbered["number"]))
