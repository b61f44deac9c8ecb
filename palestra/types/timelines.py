"""What happened in an episode, attempt by attempt, for people to read. Times are seconds since the epoch."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from palestra.types.episodes import EpisodeInfo
from palestra.types.readiness import make_ready
from palestra.types.rollouts import Message, Task


class CallSpan(Struct, frozen=True, kw_only=True):
    """A call of the model. Its tokens are in its trace."""

    began_at: float
    seconds: float
    """Waiting included."""
    trace_id: str
    turn: int
    """Its number in the trace."""
    route: str
    version: int | None
    """Version of the run's weights."""
    prompt_tokens: int
    sampled_tokens: int
    agent: str = ""
    messages: list[Message] = []
    """What the model was told since the call that this one goes on from. Empty where it is no chat."""
    answers: list[Message] = []
    """One for each sample."""


class ToolSpan(Struct, frozen=True, kw_only=True):
    """A tool that the model called, from the answer that has the call to the next one that tells the result."""

    name: str
    arguments: Any
    """JSON in a text, as the model wrote it."""
    began_at: float
    call_id: str = ""
    seconds: float | None = None
    """None: the model was told no result."""
    result: str | None = None


class AttemptTimeline(Struct, frozen=True, kw_only=True):
    attempt: int
    trace_id: str
    """In OTLP and in the log; those of the calls are of the model endpoint."""
    outcome: str
    """The episode's state, or why the attempt was lost."""
    over_at: float | None = None
    calls: list[CallSpan] = []
    tools: list[ToolSpan] = []


class EpisodeTimeline(Struct, frozen=True, kw_only=True):
    episode: EpisodeInfo
    task: Task
    attempts: list[AttemptTimeline]
    """The last one, and those that were lost and are remembered."""


make_ready(__name__)
