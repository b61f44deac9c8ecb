"""Episodes that an external trainer registers one by one, with its own names: groups of one episode, in a run for
them."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.episodes.board import EpisodeBoard
from palestra.server.agentjet.names import ADDRESS, MARK, RUN
from palestra.server.broker.push_addresses import check_address
from palestra.server.broker.service import EpisodeService
from palestra.server.core.errors import Refusal
from palestra.types.episodes import NewGroup, OnLoss
from palestra.types.rollouts import Task
from palestra.types.tinkerscript import EpisodeRegistered, RegisterEpisode

NOT_HANDED_OUT = (
    "openai_base_url and openai_api_key are not passed on: who claims the episode calls this server with a "
    "key for that attempt, and the tokens come with the result"
)

FINAL = (400, 409, 413)
"""Statuses for which repeating the request would not help."""


async def register(episodes: EpisodeService, owner: str, body: RegisterEpisode) -> EpisodeRegistered:
    """Registers an episode, whatever the engine's status is: players can claim it once the engine is rolling.
    Refusals have status 200, because AgentJet's trainer takes any other status for a lost connection, and retries for
    ever."""
    try:
        _check(body, episodes.broker.config.push_hosts)
        await _put(episodes, owner, body)
    except Refusal as error:
        if error.status not in FINAL:
            raise
        return EpisodeRegistered(success=False, failure_reason=error.detail)
    note = NOT_HANDED_OUT if body.openai_base_url or body.openai_api_key else ""
    return EpisodeRegistered(success=True, note=note)


def _check(body: RegisterEpisode, hosts: Sequence[str]) -> None:
    if MARK in body.episode_uuid:
        raise Refusal(
            400, f"episode_uuid: {MARK} is reserved for the number of an attempt, found {body.episode_uuid[:80]!r}"
        )
    if body.zmq_listen_result_addr:
        check_address(ADDRESS, body.zmq_listen_result_addr, hosts)


async def _put(episodes: EpisodeService, owner: str, body: RegisterEpisode) -> None:
    group = NewGroup(
        group_id=body.episode_uuid,
        task=Task(id=body.episode_uuid, environment=RUN, prompt=[]),
        size=1,
        on_loss=OnLoss.DROP,
        kind=body.episode_type,
        tags={ADDRESS: body.zmq_listen_result_addr},
    )

    def put(board: EpisodeBoard, now: float) -> None:
        board.put_run(owner, RUN, now)
        board.register(owner, RUN, [group], now)

    await episodes.broker.do(put)
