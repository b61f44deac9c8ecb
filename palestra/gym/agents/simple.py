"""The simple agent: a model, its tools, until it has said what it wants to say.

Owns: whose cookies go where. Never touches: the loop itself (`loop.py`).
"""

from __future__ import annotations

from typing import Any, TypeVar

from palestra.gym.agents.loop import play
from palestra.gym.servers.agents import Cookies, Reply, Rollout, WorldAgentServer, WorldAgentSettings
from palestra.gym.servers.responses import checked_response
from palestra.gym.servers.settings import Reference


class SimpleAgentSettings(WorldAgentSettings, frozen=True, kw_only=True):
    """Settings of `simple_agent`."""

    model_server: Reference
    """The model server to ask: `{type: responses_api_models, name: NAME}`."""
    max_steps: int | None = None
    """Model calls of a rollout. None: no bound."""


S = TypeVar("S", bound=SimpleAgentSettings)


class SimpleAgent(WorldAgentServer[S]):
    """`SimpleAgent[MySettings]` to derive from it with more to set."""

    plain_settings = SimpleAgentSettings

    async def respond(self, params: dict[str, Any], rollout: Rollout) -> Reply:
        table = _Table(self, rollout)
        response = await play(params, table.ask, table.use_tool, max_steps=self.settings.max_steps)
        return Reply(response=response, cookies={**table.resources_cookies, **table.model_cookies})


class _Table:
    """One rollout's cookies: each server gets back what it set last."""

    __slots__ = ("_agent", "_path", "_settings", "model_cookies", "resources_cookies")

    def __init__(self, agent: SimpleAgent[Any], rollout: Rollout) -> None:
        self._agent, self._settings = agent, agent.settings
        self._path = f"{rollout.prefix}/v1/responses"
        # Of a turn before, if an agent has several: a session of the model server stays with its replica.
        self.model_cookies: Cookies = rollout.cookies
        self.resources_cookies: Cookies = rollout.cookies

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        name = self._settings.model_server.name
        timeout_s = self._settings.model_timeout_s
        answer = await self._agent.asked(name, self._path, body, self.model_cookies, timeout_s)
        self.model_cookies = answer.cookies
        return checked_response(answer.value(), name)

    async def use_tool(self, name: str, arguments: Any) -> str:
        """Whatever its status: an error is for the model to read."""
        resources = self._settings.resources_server.name
        answer = await self._agent.peers.post(resources, f"/{name}", arguments, cookies=self.resources_cookies)
        self.resources_cookies = answer.cookies
        return answer.raw().decode(errors="replace")
