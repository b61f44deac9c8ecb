"""A process on this machine: its output line by line, its last output, its end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from palestra.placement.process import LAST_LINES, ProcessCommand, Report
from palestra.placement.reaper import OrphanReaper
from palestra.util.processes import STDOUT, signal_group, spawn

LONGEST_LINE = 16_384
PART_BYTES = 65_536
LAST_OUTPUT_S = 1.0  # after its end: a grandchild may hold the pipe open


@dataclass(frozen=True, slots=True)
class _Pipes:
    """Our ends of the pipes. They are not asyncio's own, because with these a process counts as running while one of
    its children has them."""

    output: asyncio.StreamReader
    from_it: asyncio.BaseTransport
    to_it: asyncio.WriteTransport

    def close(self) -> None:
        self.from_it.close()
        if not self.to_it.is_closing():
            self.to_it.abort()  # data that was not read by now never will be


class ChildProcess:
    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        pipes: _Pipes,
        reaper: OrphanReaper,
        on_line: Report,
        clean: Callable[[str], str],
    ) -> None:
        self._process = process
        self._pipes = pipes
        self._reaper = reaper
        self._on_line, self._clean = on_line, clean
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._reading = asyncio.create_task(self._read(), name=f"{name}-output")
        self._ending: asyncio.Task[int] = asyncio.create_task(self._end(), name=f"{name}-end")

    @classmethod
    async def start(
        cls,
        name: str,
        command: ProcessCommand,
        reaper: OrphanReaper,
        on_line: Report,
        clean: Callable[[str], str] = str,
    ) -> ChildProcess:
        """Starts a process. `clean` is applied to each line of its output. Raises OSError if there is no such
        program."""
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
        except OSError:
            os.close(our_output)
            os.close(our_input)
            raise
        finally:
            os.close(its_input)
            os.close(its_output)
        reaper.add(process.pid)
        pipes = await _connected(our_input, our_output)
        pipes.to_it.write(command.stdin)  # it stays open; its end tells the process that we have ended
        return cls(name, process, pipes, reaper, on_line, clean)

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

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

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
        while part := await self._pipes.output.read(PART_BYTES):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                self._tell(line)
            if len(rest) > LONGEST_LINE:
                self._tell(rest)
                rest = b""
        if rest:
            self._tell(rest)

    def _tell(self, line: bytes) -> None:
        text = self._clean(line[:LONGEST_LINE].decode(errors="replace").rstrip("\r"))
        self._last.append(text)
        self._on_line(text)


async def _connected(our_input: int, our_output: int) -> _Pipes:
    loop = asyncio.get_running_loop()
    output = asyncio.StreamReader()
    from_it, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(output), os.fdopen(our_input, "rb", buffering=0)
    )
    to_it, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(our_output, "wb", buffering=0))
    return _Pipes(output, from_it, to_it)
