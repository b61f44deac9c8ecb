"""Command-line agents as they are installed: how each is told where its model is, and what the puppet lets it do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from palestra.episodes import Episode
from palestra.testing.puppet import Cue
from tests.agents.walled import INSTALLED, WalledRun, run_walled

NPM = INSTALLED / "node_modules" / ".bin"


def tool_call(name: str, **arguments: Any) -> str:
    """A call as the puppet's chat template has it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class AgentProgram:
    name: str
    path: Path
    client: str
    """How its User-Agent begins."""
    route: str
    act: Callable[[str], str]
    """What the model answers to make it write the given word to out.txt."""
    command: Callable[[Episode, str], list[str]]
    """Arguments, given an episode and a prompt."""
    environment: Callable[[Episode], Mapping[str, str]] = lambda episode: {}
    files: Callable[[Episode], Mapping[str, str]] = field(default=lambda episode: {})
    """Files of its own, in the folder where it works."""
    end: str = ""
    """What the model says when the file is written; empty: some words."""
    begins: str = "new"
    """How its first prompt is found; one with examples in it is `unmatched`."""
    turns: int = 2
    agents: tuple[str, ...] = ("",)
    """The agents of its trajectories."""
    ignored: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        return f"task-{self.name}"

    @property
    def word(self) -> str:
        return f"made-by-{self.name}"

    @property
    def script(self) -> list[Cue]:
        return [
            Cue(when=self.task, say=self.act(self.word)),
            Cue(when=self.word, say=self.end or f"Program {self.name} is done."),
        ]

    def run(self, episode: Episode, prompt: str, more: Sequence[str] = ()) -> WalledRun:
        """Runs it behind the wall. `more`: further arguments."""
        arguments = [*self.command(episode, prompt), *more]
        return run_walled(self.path, arguments, episode, self.environment(episode), self.files(episode))


CLAUDE_CODE = AgentProgram(
    "claude-code",
    NPM / "claude",
    "claude-cli/2.1.325",
    "messages",
    lambda word: tool_call("Bash", command=f"echo {word} > out.txt", description="Write the file."),
    lambda episode, prompt: ["-p", prompt, "--model", episode.model, "--dangerously-skip-permissions"],
    ignored=("output_config.effort",),
)
CODEX = AgentProgram(
    "codex",
    NPM / "codex",
    "codex_exec/0.166.0",
    "responses",
    lambda word: tool_call("exec_command", cmd=f"echo {word} > out.txt"),
    lambda episode, prompt: [
        *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("-c", f'openai_base_url="{episode.base_url}"', "-m", episode.model, prompt),
    ],
    lambda episode: {"CODEX_API_KEY": episode.api_key},
    ignored=("tools.web_search",),
)
PATCHING_CODEX = replace(
    CODEX,
    name="patching",
    act=lambda word: tool_call("apply_patch", input=f"*** Begin Patch\n*** Add File: out.txt\n+{word}\n*** End Patch"),
    command=lambda episode, prompt: [
        *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("-c", f'openai_base_url="{episode.base_url}"', "-m", "gpt-5.5", prompt),
    ],
    ignored=("text.verbosity", "tools.tool_search", "tools.web_search", "reasoning.effort"),
)
"""Codex with the tools that it has for a model it knows: one of them is custom. An episode answers to any name."""
OPENCODE = AgentProgram(
    "opencode",
    NPM / "opencode",
    "opencode/1.18.18",
    "chat",
    lambda word: tool_call("bash", command=f"echo {word} > out.txt", description="Write the file."),
    lambda episode, prompt: ["run", "--model", f"palestra/{episode.model}", prompt],
    files=lambda episode: {
        "opencode.json": json.dumps(
            {
                "provider": {
                    "palestra": {
                        "npm": "@ai-sdk/openai-compatible",
                        "options": {"baseURL": episode.base_url, "apiKey": "{env:OPENAI_API_KEY}"},
                        "models": {episode.model: {}},
                    }
                }
            }
        )
    },
    agents=("", "side"),  # it asks for a title of the conversation
)
QWEN_CODE = AgentProgram(
    "qwen-code",
    NPM / "qwen",
    "QwenCode/0.24.4",
    "chat",
    lambda word: tool_call("run_shell_command", command=f"echo {word} > out.txt", is_background=False),
    lambda episode, prompt: ["--yolo", "--auth-type", "openai", "-p", prompt],
    lambda episode: {"OPENAI_MODEL": episode.model},
)

MINI_SWE_AGENT = AgentProgram(
    "mini-swe-agent",
    INSTALLED / "litellm" / "bin" / "mini",
    "OpenAI/Python",  # LiteLLM names itself nowhere
    "chat",
    lambda word: tool_call("bash", command=f"echo {word} > out.txt"),
    lambda episode, prompt: [
        *("--model", f"openai/{episode.model}", "--task", prompt, "--yolo", "--exit-immediately"),
        *("--cost-limit", "0", "--output", "trajectory.json"),
    ],
    lambda episode: {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
    end=tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
)
AIDER_CHAT = AgentProgram(
    "aider",
    INSTALLED / "aider" / "bin" / "aider",
    "OpenAI/Python",
    "chat",
    lambda word: f"out.txt\n```\n{word}\n```",
    lambda episode, prompt: [
        *("--model", f"openai/{episode.model}", "--edit-format", "whole", "--yes-always", "--no-git", "--no-gitignore"),
        *("--no-check-update", "--no-show-release-notes", "--no-show-model-warnings", "--analytics-disable"),
        *("--no-detect-urls", "--message", prompt, "out.txt"),
    ],
    lambda episode: {"OPENAI_API_BASE": episode.base_url},
    begins="unmatched",
    turns=1,
)

PROGRAMS = [CLAUDE_CODE, CODEX, PATCHING_CODEX, OPENCODE, QWEN_CODE, MINI_SWE_AGENT, AIDER_CHAT]
