"""The record of one episode of an audit, whoever played it."""

from __future__ import annotations

import json
from enum import StrEnum

from msgspec import Struct, field

from palestra.types.rollouts import Message
from palestra.util.json_types import JsonObject

SHOWN_CHARS = 300
SHOWN_MESSAGES = 8


class Trouble(StrEnum):
    """Why an episode has failed."""

    RAISED = "raised"
    HUNG = "hung"
    BAD_REWARD = "bad-reward"
    """The reward is no finite number."""


class ProbeEpisode(Struct, kw_only=True):
    task: str
    probe: str
    repeat: int = 0
    messages: list[Message] = []
    """The conversation, in order."""
    first: int = 0
    """Number of messages that the environment began with."""
    reward: float | None = None
    """The sum over all steps. None: it was not graded, or has failed."""
    steps: list[float | None] = []
    """The reward of each step, where these are known."""
    is_done: bool = False
    """Whether the environment ended it."""
    trouble: Trouble | None = None
    error: str = ""
    init_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    step_memory_bytes: int = 0
    """The largest growth of this process's memory in one step, where it is known."""
    verdict: JsonObject = {}

    @property
    def turns(self) -> int:
        return sum(message["role"] == "assistant" for message in self.messages[self.first :])

    @property
    def outcome(self) -> str:
        """Returns as text what must be the same if the same is played again."""
        return json.dumps([self.messages, self.reward, self.trouble], sort_keys=True, default=str)

    @property
    def transcript(self) -> list[str]:
        """The first and the last messages, shortened."""
        lines = [f"{message['role']}: {shortened(text_of(message))}" for message in self.messages]
        if len(lines) > SHOWN_MESSAGES:
            head, tail = SHOWN_MESSAGES // 2, SHOWN_MESSAGES - SHOWN_MESSAGES // 2
            lines = [*lines[:head], f"({len(lines) - SHOWN_MESSAGES} messages more)", *lines[-tail:]]
        end = f"({self.error})" if self.trouble else f"(reward {'none' if self.reward is None else f'{self.reward:g}'})"
        return [*lines, shortened(end)]


def text_of(message: Message) -> str:
    """The text of a message, with the calls that it makes."""
    content = message.get("content")
    shown = content if isinstance(content, str) else "" if content is None else json.dumps(content, default=str)
    calls = message.get("tool_calls")
    return shown if not calls else f"{shown} {json.dumps([one.get('function') for one in calls], default=str)}".strip()


def shortened(text: str, limit: int = SHOWN_CHARS) -> str:
    line = " ".join(text.split())
    line = line.encode(errors="replace").decode()
    return line if len(line) <= limit else f"{line[: limit * 2 // 3]} … {line[-limit // 3 :]} ({len(text)} characters)"
