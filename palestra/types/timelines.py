"""The timeline of an episode, attempt by attempt, for people to read. Times are seconds since the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from palestra.types.episodes import EpisodeInfo
from palestra.types.readiness import make_ready
from palestra.types.rollouts import Message, Task


class CallSpan(Struct, frozen=True, kw_only=True):
    """A model call. Its tokens are in its trace."""

    began_at: float
    seconds: float
    """Duration, including the time it waited."""
    trace_id: str
    turn: int
    """Number of the call in the trace."""
    route: str
    version: int | None
    """Version of the run's weights."""
    prompt_tokens: int
    sampled_tokens: int
    agent: str = ""
    messages: list[Message] = []
    """Messages added since the call that this one continues. Empty if it is not a chat."""
    answers: list[Message] = []
    """The answers, one for each sample."""


class ToolSpan(Struct, frozen=True, kw_only=True):
    """A tool call: from the answer that contains it to the model call that has its result."""

    name: str
    arguments: Any
    """The arguments as JSON text, as the model wrote them."""
    began_at: float
    call_id: str = ""
    seconds: float | None = None
    """None if the model got no result."""
    result: str | None = None


def turn_times(calls: Sequence[CallSpan]) -> list[list[float]]:
    """Returns the seconds of each call of one conversation, and those until the next one began: the agent's own
    work."""
    begins = [call.began_at for call in calls[1:]]
    waits = [begin - call.began_at - call.seconds for call, begin in zip(calls, begins, strict=False)]
    return [[call.seconds, max(0.0, wait)] for call, wait in zip(calls, [*waits, 0.0], strict=False)]


class AttemptTimeline(Struct, frozen=True, kw_only=True):
    attempt: int
    trace_id: str
    """Trace id in OTLP and in the log; the calls have their own at the model endpoint."""
    outcome: str
    """The episode's state, or why the attempt was lost."""
    over_at: float | None = None
    calls: list[CallSpan] = []
    tools: list[ToolSpan] = []


class EpisodeTimeline(Struct, frozen=True, kw_only=True):
    episode: EpisodeInfo
    task: Task
    attempts: list[AttemptTimeline]
    """The last attempt, and the lost ones that are still stored."""


make_ready(__name__)
