"""The agents that are known by name, and commands that are none of them.

`make test-agents` runs these programs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from palestra.agents.program import AgentProgram, AgentTask
from palestra.util.suggest import did_you_mean

SHELL_AGENT = Path(__file__).with_name("shell_agent.py")
SHELL_AGENT_AT = ".palestra/shell_agent.py"


class UnknownAgentProgram(LookupError):
    """There is no agent of that name, and no such program. The text says what to type."""


def _codex(task: AgentTask) -> list[str]:
    free = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["exec", *free, "-c", f'openai_base_url="{task.base_url}"', "-m", task.model, task.prompt]


def _opencode(task: AgentTask) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": task.base_url, "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {task.model: {}},
    }
    return {".config/opencode/opencode.json": json.dumps({"provider": {"palestra": provider}})}


def _mini(task: AgentTask) -> list[str]:
    quiet = ["--yolo", "--exit-immediately", "--cost-limit", "0", "--output", "/tmp/mini-swe-agent.json"]
    return ["--model", f"openai/{task.model}", "--task", task.prompt, *quiet]


AGENTS = {
    one.name: one
    for one in (
        AgentProgram(
            name="claude",
            program="claude",
            arguments=lambda task: ["-p", task.prompt, "--model", task.model, "--dangerously-skip-permissions"],
            env=lambda _: {"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        ),
        AgentProgram(name="codex", program="codex", arguments=_codex, env=lambda task: {"CODEX_API_KEY": task.api_key}),
        AgentProgram(
            name="opencode",
            program="opencode",
            arguments=lambda task: ["run", "--model", f"palestra/{task.model}", task.prompt],
            home_files=_opencode,
        ),
        AgentProgram(
            name="qwen",
            program="qwen",
            arguments=lambda task: ["--yolo", "--auth-type", "openai", "-p", task.prompt],
            env=lambda task: {"OPENAI_MODEL": task.model},
        ),
        AgentProgram(
            name="mini",
            program="mini",
            arguments=_mini,
            env=lambda _: {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
        ),
        AgentProgram(
            name="shell",
            program="sh",
            arguments=lambda _: ["-c", f'exec python3 "$HOME/{SHELL_AGENT_AT}" "$@"', "shell"],
            home_files=lambda _: {SHELL_AGENT_AT: SHELL_AGENT.read_text(encoding="utf-8")},
        ),
    )
}
"""Claude Code, Codex, opencode, qwen-code, mini-swe-agent, and a small one of our own."""


def find_agent(command: Sequence[str]) -> AgentProgram:
    """Returns a named agent, with further words as its last arguments; or a command: one word with spaces is a line for
    the shell, several words are a program and its arguments. Raises UnknownAgentProgram."""
    first, *more = command
    if first in AGENTS:
        return replace(AGENTS[first], more=tuple(more))
    if not more and len(first.split()) > 1:
        return AgentProgram(name="command", program="sh", arguments=lambda _: ["-c", first])
    if "/" not in first and shutil.which(first) is None:
        raise UnknownAgentProgram(f"there is no agent and no program {first!r}; {did_you_mean(first, AGENTS)}")
    return AgentProgram(name="command", program=first, arguments=lambda _: more)
