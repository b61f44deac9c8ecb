"""Environment servers that pass everything on to one agent: NeMo Gym's `legacy_agent`."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from palestra.gym.errors import BadCall
from palestra.gym.records import ServerInstance, ServerKind
from palestra.gym.servers.base import GymServer, Peers, RouteSchemas
from palestra.gym.servers.settings import ServerReference, settings_of
from palestra.gym.wire import GymRequest, GymResponse

PATHS = ("/run", "/aggregate_metrics")


class LegacyAgentSettings(Struct, frozen=True, kw_only=True):
    """Settings of `legacy_agent`. As in NeMo Gym, its limits have no effect: the agent has its own."""

    agent_server: ServerReference
    """The agent that plays: `{type: responses_api_agents, name: NAME}`."""
    max_concurrent_episodes: Any = None
    queue_timeout_seconds: Any = None
    default_episode_timeout_seconds: Any = None
    cleanup_timeout_seconds: Any = None


class LegacyAgent(GymServer):
    """Answers as its agent does."""

    kind = ServerKind.ENVIRONMENT

    def __init__(self, instance: ServerInstance, peers: Peers) -> None:
        super().__init__(instance, peers)
        self.settings = settings_of(instance, LegacyAgentSettings)

    async def answer(self, call: GymRequest) -> GymResponse:
        if call.path not in PATHS:
            raise BadCall(404, "Not Found")
        return await self.peers.post(self.settings.agent_server.name, call.path, call.body, cookies=call.cookies)

    def routes(self) -> RouteSchemas:
        return {path: {"type": "object"} for path in PATHS}
