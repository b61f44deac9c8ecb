"""Reads a client's headers: its name and version, and for which of its agents a call is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from palestra.config.redaction import redact

MAX_NAME = 120
_COMMENT = re.compile(r"\([^()]*\)")
_SUBAGENTS = {"x-palestra-agent": None, "x-openai-subagent": None, "x-claude-code-agent-id": "subagent"}
"""Headers on calls for one of several agents, and the name of that agent; None: the header's value, as our own players
send a name and Codex a kind. Claude Code sends an id that is new each time."""


@dataclass(frozen=True, slots=True)
class ClientHeaders:
    client: str = ""
    """Name and version of the program, as in `claude-cli/2.1.325`."""
    agent: str = ""
    """The sub-agent for which it makes the call; empty for its main agent."""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> ClientHeaders:
        products = _COMMENT.sub(" ", headers.get("user-agent", "")[: 4 * MAX_NAME])
        agent = next((name or headers[header] for header, name in _SUBAGENTS.items() if headers.get(header)), "")
        return cls(_shown(" ".join(products.split())), _shown(agent))


def _shown(text: str) -> str:
    return redact(text)[:MAX_NAME]
