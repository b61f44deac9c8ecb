"""Command-line agents that play episodes of coding tasks in sandboxes. Begin at `player`."""

from palestra.agents.named import AGENTS, UnknownAgentProgram, find_agent
from palestra.agents.player import AgentPlayer

__all__ = ["AGENTS", "AgentPlayer", "UnknownAgentProgram", "find_agent"]
