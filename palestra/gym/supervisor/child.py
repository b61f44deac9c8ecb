"""One running process of a gym: its output with its name before each line, its last output, its end.

Owns: the process on this machine, its group, its pipes; the interface of a host for processes (another one is
`ray_nodes.py`). Never touches: health, restarts.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from palestra.config.redaction import redact
from palestra.gym.errors import ServerStartError
from palestra.gym.supervisor.plan import PlannedProcess, ProcessCommand
from palestra.gym.supervisor.reaper import OrphanReaper
from palestra.util.processes import STDOUT, signal_group, spawn

LAST_LINES = 30
LONGEST_LINE = 16_384
PART_BYTES = 65_536
LAST_OUTPUT_S = 1.0  # after its end: a grandchild may hold the pipe open


@dataclass(frozen=True, slots=True)
class _Pipes:
    """Our ends of the pipes. They are not asyncio's own, because with these a process counts as running while one of
    its children has them."""

    said: asyncio.StreamReader
    from_it: asyncio.BaseTransport
    to_it: asyncio.WriteTransport

    def close(self) -> None:
        self.from_it.close()
        if not self.to_it.is_closing():
            self.to_it.abort()  # data that was not read by now never will be


class GymProcess:
    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        pipes: _Pipes,
        reaper: OrphanReaper,
        report: Callable[[str], None],
    ) -> None:
        self.name = name
        self._process = process
        self._pipes = pipes
        self._reaper = reaper
        self._report = report
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._reading = asyncio.create_task(self._read(), name=f"{name}-output")
        self._ending: asyncio.Task[int] = asyncio.create_task(self._end(), name=f"{name}-end")

    @classmethod
    async def start(
        cls, name: str, command: ProcessCommand, reaper: OrphanReaper, report: Callable[[str], None]
    ) -> GymProcess:
        """Starts a process. Raises ServerStartError if there is no such program."""
        its_input, our_output = os.pipe()
        our_input, its_output = os.pipe()
        try:
            process = await spawn(
                *command.arguments,
                cwd=command.folder,
                env=command.environment,
                stdin=its_input,
                stdout=its_output,
                stderr=STDOUT,
                pass_fds=command.sockets,
            )
        except OSError as error:
            os.close(our_output)
            os.close(our_input)
            raise ServerStartError(f"{name}: cannot run {command.arguments[0]} ({error.strerror})") from None
        finally:
            os.close(its_input)
            os.close(its_output)
        reaper.add(process.pid)
        pipes = await _connected(our_input, our_output)
        pipes.to_it.write(command.stdin)  # it stays open; its end tells the process that we have ended
        return cls(name, process, pipes, reaper, report)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_output(self) -> str:
        return "\n".join(self._last)

    @property
    def has_ended(self) -> bool:
        return self._ending.done()

    async def wait(self) -> int:
        """Returns its exit code, once its output is read and its group is gone."""
        return await asyncio.shield(self._ending)

    async def stop(self, timeout_s: float) -> None:
        """Asks it to stop, then kills it."""
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        self._signal(signal.SIGKILL)
        await self.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            signal_group(self._process.pid, number)

    async def _end(self) -> int:
        code = await self._process.wait()
        self._reaper.end(self._process.pid)
        await asyncio.wait({self._reading}, timeout=LAST_OUTPUT_S)
        self._reading.cancel()
        self._pipes.close()
        return code

    async def _read(self) -> None:
        rest = b""
        while part := await self._pipes.said.read(PART_BYTES):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                self._on_line(line)
            if len(rest) > LONGEST_LINE:
                self._on_line(rest)
                rest = b""
        if rest:
            self._on_line(rest)

    def _on_line(self, line: bytes) -> None:
        text = redact(line[:LONGEST_LINE].decode(errors="replace").rstrip("\r"))
        self._last.append(text)
        self._report(f"({self.name}) {text}")


async def _connected(our_input: int, our_output: int) -> _Pipes:
    loop = asyncio.get_running_loop()
    said = asyncio.StreamReader()
    from_it, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(said), os.fdopen(our_input, "rb", buffering=0)
    )
    to_it, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(our_output, "wb", buffering=0))
    return _Pipes(said, from_it, to_it)


def log_to(folder: Path, name: str, report: Callable[[str], None]) -> Callable[[str], None]:
    """Writes the output of a process to a file as well (`nemo_gym_log_dir`). A file that cannot be written is reported
    once, and its lines are lost: a process whose output nobody reads would block."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name.replace('/', '_')}.log"

    is_broken = False

    def written(line: str) -> None:
        nonlocal is_broken
        try:
            with file.open("a", encoding="utf-8", errors="replace") as out:
                out.write(f"{line}\n")
            is_broken = False
        except OSError as error:
            if not is_broken:
                report(f"{name}: cannot write {file} ({error.strerror}); until then, its output is only shown here")
            is_broken = True
        report(line)

    return written


Report = Callable[[str], None]


class NotPlaced(ServerStartError):
    """There is no node for it at the moment. Another try may find one."""


class RunningProcess(Protocol):
    """One started process, wherever it runs."""

    @property
    def pid(self) -> int: ...

    @property
    def last_output(self) -> str: ...

    @property
    def has_ended(self) -> bool: ...

    async def wait(self) -> int:
        """Waits for its end and returns its exit code."""
        ...

    async def stop(self, timeout_s: float) -> None: ...

    async def kill(self) -> None: ...


class Place(Protocol):
    async def start(self, process: PlannedProcess, report: Report, on_line: Report) -> RunningProcess:
        """`report` gets notes for people, `on_line` what the process prints. Raises ServerStartError."""
        ...


class ThisMachine:
    def __init__(self, reaper: OrphanReaper) -> None:
        self._reaper = reaper

    async def start(self, process: PlannedProcess, report: Report, on_line: Report) -> RunningProcess:
        return await GymProcess.start(process.name, await process.command(report), self._reaper, on_line)
