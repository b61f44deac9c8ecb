"""An agent as a program to be started: its arguments, its environment, and the settings it reads from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """The arguments with which an agent is started for an episode."""

    prompt: str
    model: str
    base_url: str
    """Address of the model for OpenAI's clients, as seen from the sandbox."""
    api_key: str

    @property
    def environment(self) -> dict[str, str]:
        """Variables that every agent gets."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "PROMPT": self.prompt,
            "MODEL": self.model,
        }


def _nothing(_: AgentTask) -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProgram:
    """A program that solves tasks with a model."""

    name: str
    program: str
    """Name or path of the program."""
    arguments: Callable[[AgentTask], Sequence[str]]
    env: Callable[[AgentTask], Mapping[str, str]] = _nothing
    """Variables beside those that every agent gets."""
    home_files: Callable[[AgentTask], Mapping[str, str]] = _nothing
    """Files by their path in the agent's home folder: the task's own folder has nothing but the task."""
    more: tuple[str, ...] = ()
    """Arguments of the user, after its own."""

    def command(self, task: AgentTask) -> list[str]:
        return [self.program, *self.arguments(task), *self.more]

    def environment(self, task: AgentTask) -> dict[str, str]:
        return {**task.environment, **self.env(task)}
