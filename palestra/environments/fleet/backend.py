"""What a Fleet task is played on: one instance of an app, wherever it runs.

Owns: the protocol. A backend is for one episode: `create`, then the rest, and `close` whatever happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from palestra.environments.fleet.partial import partial_score
from palestra.environments.fleet.records import FleetTask
from palestra.environments.fleet.settings import FleetSettings
from palestra.environments.fleet.tool_schemas import ToolSpec
from palestra.environments.platform.verifiers import Execution


class ToolAnswer(msgspec.Struct, frozen=True):
    """What a tool call came to."""

    result: Any
    """What JSON can say; text where it is no JSON."""
    error: str = ""
    """What the tool said went wrong."""


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """What a verifier says about an episode."""

    score: float | None
    """None: unknown, because the verifier itself broke, or returned no score."""
    partial: float = 0.0
    """For those who want it, where the score is 0."""
    stdout: str = ""
    error: str = ""

    @classmethod
    def of(cls, done: Execution) -> Grade:
        return cls(score=done.score, partial=partial_score(done.stdout), stdout=done.stdout, error=done.error)


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """What a verifier may look at besides the instance."""

    answer: str | None = None
    conversation: Sequence[dict[str, Any]] = ()


class Backend(Protocol):
    """One instance of an app for one episode: made, called, verified and closed."""

    async def create(self) -> None:
        """Raises BackendError."""
        ...

    async def list_tools(self) -> list[ToolSpec]: ...

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        """What the tool itself says is wrong is an answer. Raises BackendError where there is no instance any more."""
        ...

    async def verify(self, attempt: Attempt) -> Grade: ...

    async def close(self) -> None:
        """Also of one that was never created; the second time does nothing."""
        ...


BackendFactory = Callable[[FleetTask, FleetSettings], Backend]
