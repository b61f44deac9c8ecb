"""A process on a node of a Ray cluster."""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]

from palestra.placement.child import ChildProcess
from palestra.placement.process import LAST_LINES, ProcessCommand, Report
from palestra.placement.reaper import OrphanReaper

LOST = -9
"""The exit code of a process whose node is gone."""
GOODBYE_S = 5.0
NEWS_S = 2.0
MAX_LINES = 10_000  # kept until they are fetched


class Launcher(Protocol):
    """Made on the node, from bytes; it lives as long as the process."""

    async def command(self, report: Report) -> ProcessCommand: ...

    @property
    def answer(self) -> Any:
        """Returns what the starter of the process wants to know, as plain data."""
        ...


class NodeProcess:
    """Runs on the node, as an actor: one process after another. It ends with the actor, whatever ends that."""

    def __init__(self, forget_after_s: float | None = None) -> None:
        """`forget_after_s`: without a process for so long, its owner will not come back, and the actor's placement
        group is given back."""
        self._reaper = OrphanReaper()
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._arrived = asyncio.Event()
        self._launcher: Launcher | None = None
        self._child: ChildProcess | None = None
        self._forget_after_s = forget_after_s
        self._watching: asyncio.Task[None] | None = None

    async def where(self) -> tuple[str, str]:
        """The node's id and address."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    async def free_ports(self, count: int) -> list[int]:
        """Returns free ports."""
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            for one in sockets:
                one.bind((ray.util.get_node_ip_address(), 0))
            return [one.getsockname()[1] for one in sockets]

    async def start(self, name: str, launcher: str, argument: bytes) -> Any:
        """Starts a process. `launcher` is the `module:Class` of a Launcher that is made of the argument."""
        module, _, kind = launcher.partition(":")
        self._launcher = getattr(importlib.import_module(module), kind)(argument)
        assert self._launcher is not None
        if self._watching is not None:
            self._watching.cancel()
        self._child = await ChildProcess.start(name, await self._launcher.command(self._hear), self._reaper, self._hear)
        self._watching = asyncio.create_task(self._watch(self._child), name="watch")
        return self._launcher.answer

    async def pid(self) -> int | None:
        """The process's number. None: no process runs."""
        return None if self._child is None or self._child.has_ended else self._child.pid

    async def news(self) -> list[str]:
        """Returns what it has printed since the last call; waits a moment for something."""
        if self._child is not None and not self._child.has_ended:
            with suppress(TimeoutError):
                async with asyncio.timeout(NEWS_S):
                    await self._arrived.wait()
            self._arrived.clear()
        found = list(self._lines)
        self._lines.clear()
        return found

    async def wait(self) -> int:
        assert self._child is not None
        return await self._child.wait()

    async def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()

    async def stop(self, timeout_s: float) -> None:
        if self._child is not None:
            await self._child.stop(timeout_s)

    def _hear(self, line: str) -> None:
        self._lines.append(line)
        self._arrived.set()

    async def _watch(self, child: ChildProcess) -> None:
        await child.wait()
        self._arrived.set()
        if self._forget_after_s is None:
            return
        await asyncio.sleep(self._forget_after_s)
        group = ray.util.get_current_placement_group()
        if group is not None:
            await asyncio.to_thread(ray.util.remove_placement_group, group)


class RemoteProcess:
    """The same process as seen from here."""

    def __init__(
        self,
        actor: Any,
        pid: int,
        on_line: Report,
        *,
        clean: Callable[[str], str] = str,
        keeps_actor: bool = False,
    ) -> None:
        """`keeps_actor`: the actor stays when the process has ended, and may start another."""
        self.pid = pid
        self._actor, self._on_line, self._clean, self._keeps_actor = actor, on_line, clean, keeps_actor
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._is_over = False
        self._reading = asyncio.create_task(self._read(), name="ray-output")
        self._ending: asyncio.Task[int] = asyncio.create_task(self._end(), name="ray-end")

    @property
    def last_output(self) -> str:
        return "\n".join(self._last)

    @property
    def has_ended(self) -> bool:
        return self._ending.done()

    async def wait(self) -> int:
        return await asyncio.shield(self._ending)

    async def terminate(self) -> None:
        """Asks it to end."""
        with suppress(RayError):
            await self._actor.terminate.remote()

    async def stop(self, timeout_s: float) -> None:
        with suppress(RayError, TimeoutError):
            await asyncio.wait_for(self._actor.stop.remote(timeout_s), timeout_s + GOODBYE_S)
        await self.kill()

    async def halt(self) -> None:
        """Kills the process; the actor stays, unless it does not answer."""
        try:
            await asyncio.wait_for(self._actor.stop.remote(0.0), GOODBYE_S)
        except (RayError, TimeoutError):
            kill_actor(self._actor)
        await self.wait()

    async def kill(self) -> None:
        """Ends the actor, and with it the process: the reaper on the node kills it."""
        kill_actor(self._actor)
        await self.wait()

    def leave(self) -> None:
        """Stops following it; it goes on."""
        self._reading.cancel()
        self._ending.cancel()

    async def _end(self) -> int:
        try:
            code = await self._actor.wait.remote()
            self._is_over = True
            await asyncio.wait({self._reading}, timeout=NEWS_S * 2)
            if not self._keeps_actor:
                kill_actor(self._actor)
        except RayError as error:
            code = LOST
            self._hear(f"its node or its actor has ended: {' '.join(str(error).split())}")
        self._reading.cancel()
        return code

    async def _read(self) -> None:
        with suppress(RayError):
            while True:
                was_over = self._is_over
                for line in await self._actor.news.remote():
                    self._hear(line)
                if was_over:
                    return

    def _hear(self, line: str) -> None:
        text = self._clean(line)
        self._last.append(text)
        self._on_line(text)


def kill_actor(actor: Any) -> None:
    with suppress(RayError):
        ray.kill(actor)
