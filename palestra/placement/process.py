"""A process as its starter sees it, wherever it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

LAST_LINES = 30
Report = Callable[[str], None]


class NotPlaced(Exception):
    """No node has room for the process at the moment; the message says what is missing. Another try may find one."""


@dataclass(frozen=True, slots=True)
class ProcessCommand:
    arguments: list[str]
    environment: dict[str, str]
    folder: Path | None = None
    stdin: bytes = b""
    """Written to its standard input, which stays open."""
    sockets: list[int] = field(default_factory=list)
    """Descriptors that it inherits, under the same numbers."""


class RunningProcess(Protocol):
    """One started process."""

    @property
    def pid(self) -> int: ...

    @property
    def last_output(self) -> str: ...

    @property
    def has_ended(self) -> bool: ...

    async def wait(self) -> int:
        """Waits for its end and returns its exit code."""
        ...

    async def stop(self, timeout_s: float) -> None:
        """Asks it to end, then kills it."""
        ...

    async def kill(self) -> None: ...
