"""Where a process of a gym runs: on this machine, or (`ray_nodes.py`) on a node of a cluster.

Owns: the interface, and this machine. Never touches: when to start and stop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from palestra.gym.errors import ServerStartError
from palestra.gym.supervisor.child import Child
from palestra.gym.supervisor.plan import Process
from palestra.gym.supervisor.reaper import Reaper

Tell = Callable[[str], None]


class NotPlaced(ServerStartError):
    """No place for it just now. Another try may find one."""


class Running(Protocol):
    """One started process, wherever it is."""

    @property
    def pid(self) -> int: ...

    @property
    def last_words(self) -> str: ...

    @property
    def has_ended(self) -> bool: ...

    async def wait(self) -> int:
        """Its exit code."""
        ...

    async def stop(self, timeout_s: float) -> None: ...

    async def kill(self) -> None: ...


class Place(Protocol):
    async def start(self, process: Process, tell: Tell, heard: Tell) -> Running:
        """`tell` is for people, `heard` for what the process prints. Raises ServerStartError."""
        ...


class ThisMachine:
    def __init__(self, reaper: Reaper) -> None:
        self._reaper = reaper

    async def start(self, process: Process, tell: Tell, heard: Tell) -> Running:
        return await Child.start(process.name, await process.command(tell), self._reaper, heard)
