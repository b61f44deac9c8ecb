"""Sessions of an agent that an environment server opens: the records, for agents that can be played in both ways.

A Palestra gym has no environment servers, and plays agents by `/run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException, Request
from pydantic import Field

from nemo_gym.episode_types import EpisodeId, EpisodeModel, TaskId
from nemo_gym.rollout_observability import AgentObservationBundle
from nemo_gym.sandbox.access import SandboxAccess
from nemo_gym.tool_access import ToolAccess

AGENT_SESSION_COOKIE_KEY = "agent_session_id"


class AgentSeedSessionRequest(EpisodeModel):
    agent_session_id: str = Field(min_length=1)
    episode_id: EpisodeId
    task_id: TaskId
    tool_accesses: list[ToolAccess] = Field(default_factory=list)
    sandbox_access: SandboxAccess | None = None


class AgentCloseSessionResponse(EpisodeModel):
    agent_session_id: str
    agent_observations: AgentObservationBundle | None = None
    resources_cookies: dict[str, str] | None = None


@dataclass
class AgentSessionState:
    """What an agent keeps of a session; each has its own."""

    request: AgentSeedSessionRequest


class AgentSessions:
    """A mixin of agents."""

    config: Any

    @staticmethod
    def _agent_session_id_from_request(request: Request | None) -> str | None:
        session = {} if request is None else request.scope.get("session")
        return session.get(AGENT_SESSION_COOKIE_KEY) if isinstance(session, Mapping) else None

    def _require_agent_session(self, agent_session_id: str) -> AgentSessionState:
        raise HTTPException(409, f"there is no agent session {agent_session_id!r}: a Palestra gym opens none")

    def effective_tool_accesses(self, request: AgentSeedSessionRequest) -> list[ToolAccess]:
        """Those of the episode over those of the config, by name."""
        return list({one.name: one for one in (*self.config.tool_accesses, *request.tool_accesses)}.values())
