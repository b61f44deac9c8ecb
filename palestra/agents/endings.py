"""Endings of agents, and their rewards."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from palestra.config.agents import AgentConfig
from palestra.config.endings import Worth
from palestra.types.timelines import AttemptTimeline, EpisodeTimeline


class AgentEnding(StrEnum):
    DONE = "done"
    """The agent ended by itself and changed something."""
    TIMEOUT = "timeout"
    CRASH = "crash"
    """The agent ended with another status than 0, or with its sandbox."""
    REFUSAL = "refusal"
    """The agent ended by itself; the model called no tool, and nothing was changed."""
    EMPTY_PATCH = "empty_patch"
    """The agent ended by itself, and nothing was changed."""
    SILENT = "silent"
    """The agent called no model: there is nothing to learn from, and it may be set up wrongly."""

    def worth(self, config: AgentConfig) -> Worth:
        match self:
            case AgentEnding.DONE:
                return "grade"
            case AgentEnding.TIMEOUT:
                return config.on_timeout
            case AgentEnding.CRASH:
                return config.on_crash
            case AgentEnding.REFUSAL:
                return config.on_refusal
            case AgentEnding.EMPTY_PATCH:
                return config.on_empty_patch
            case AgentEnding.SILENT:
                return "mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRun:
    """What is known of an agent that has ended."""

    status: int
    """The agent's exit status; -1 if its sandbox ended."""
    is_late: bool
    seconds: float
    patch: str | None
    """What it changed; None: its sandbox has ended, or its files cannot be read."""
    calls: AttemptTimeline | None
    """The agent's model calls and tools; None: this player's key does not let it read them."""

    @property
    def ending(self) -> AgentEnding:
        if self.calls is not None and not self.calls.calls:
            return AgentEnding.SILENT
        if self.is_late:
            return AgentEnding.TIMEOUT
        if self.status or self.patch is None:
            return AgentEnding.CRASH
        if self.patch:
            return AgentEnding.DONE
        is_refusal = self.calls is not None and not self.calls.tools
        return AgentEnding.REFUSAL if is_refusal else AgentEnding.EMPTY_PATCH


def attempt_of(timeline: EpisodeTimeline, attempt: int) -> AttemptTimeline | None:
    return next((one for one in timeline.attempts if one.attempt == attempt), None)
