"""Settings of agents that play coding tasks: for `palestra agent play`, and for `rollouts: agent` of a training run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat

from palestra.config.base import Config, Folder
from palestra.config.endings import Worth


def _as_list(given: object) -> object:
    return [given] if isinstance(given, str) else given


class AgentConfig(Config):
    """Which agent plays, how, and what its endings are worth. See docs/agents.md."""

    command: Annotated[list[str], BeforeValidator(_as_list)] = Field(default=["shell"], min_length=1)
    """Name of an agent (claude, codex, opencode, qwen, mini, shell) and further arguments for it; or a command, which
    gets PROMPT, MODEL and the address and key of its model as variables."""
    concurrency: NonNegativeInt = 4
    """Episodes that are played here at a time. 0: all players are elsewhere (palestra agent play)."""
    sandbox: str = "local"
    """Backend of the sandboxes; see docs/sandbox.md."""
    timeout_s: PositiveFloat | None = None
    """Time limit of the agent. None: that of the task."""
    visible: list[Folder] = Field(default=[])
    """Folders of this machine that are shown in the sandboxes, read only. The agent's installation is shown anyway."""
    on_timeout: Worth = "grade"
    """What an episode is worth whose agent took too long and was ended: `grade`, `mask`, or a number."""
    on_crash: Worth = "grade"
    """What an episode is worth whose agent ended with another status than 0. If its sandbox ended too, as it does when
    it holds too much memory, there is no work to grade, and `grade` is 0."""
    on_refusal: Worth = 0.0
    """What an episode is worth in which the model called no tool and nothing was changed."""
    on_empty_patch: Worth = 0.0
    """What an episode is worth in which tools were called, but nothing was changed."""


class AgentRollouts(AgentConfig):
    """Settings for `rollouts: agent`."""

    train_on: list[Literal["continuations", "subagents", "side"]] = Field(default=["continuations", "subagents"])
    """Which conversations are trained besides the main one. continuations: the main agent's after it compacted its
    context, or began anew. subagents: those with a name of their own. side: calls without tools, such as titles."""
