"""Command-line agents that play episodes of coding tasks in sandboxes. Begin at `player`."""

from palestra.agents.player import AgentPlayer
from palestra.agents.registry import AGENTS, UnknownAgentProgram, find_agent

__all__ = ["AGENTS", "AgentPlayer", "UnknownAgentProgram", "find_agent"]
