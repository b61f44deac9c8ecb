"""A command's standard streams: pipes, fed and read within bounds.

Only pipes are handed in: a file could be opened again by its descriptor, and changed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import IO

from palestra.sandbox.spec import STDERR, STDOUT, OutputSink
from palestra.util.processes import GroupLeader

CHUNK = 256 * 1024
LAST_WORDS_S = 0.2  # for output that is still in the pipe when the command has ended
SLOW_DOWN_S = 0.002  # after each chunk that is dropped, so that a flood of output does not take the owner's time


class OutputPipe:
    """One stream of a command's output: its beginning is kept or handed on, the rest is read and dropped."""

    def __init__(self, number: int, max_bytes: int, sink: OutputSink | None) -> None:
        self.kept = bytearray()
        self.dropped_bytes = 0
        self.is_handing_on = False
        self._outside, self.inside = os.pipe()
        self._number, self._room, self._sink = number, max_bytes, sink

    async def read(self) -> None:
        """Reads until the last one who could write has closed it."""
        reader = asyncio.StreamReader(limit=CHUNK)
        pipe = os.fdopen(self._outside, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while chunk := await reader.read(CHUNK):
                self.is_handing_on = self._sink is not None and self._room > 0
                await self._take(chunk)
                self.is_handing_on = False
        finally:
            self.is_handing_on = False
            transport.close()

    async def _take(self, chunk: bytes) -> None:
        taken = chunk[: self._room]
        self._room -= len(taken)
        if self._sink is None:
            self.kept += taken
        elif taken:
            await self._sink(self._number, taken)
        if len(taken) < len(chunk):
            self.dropped_bytes += len(chunk) - len(taken)
            await asyncio.sleep(SLOW_DOWN_S)


class InputPipe:
    """The stream from which a command reads."""

    def __init__(self, source: bytes | IO[bytes]) -> None:
        self._source = source
        self.inside, self._outside = os.pipe()

    async def write(self) -> None:
        """Writes everything and closes the pipe; stops when the reader is gone."""
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(self._outside, "wb", buffering=0)
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        try:
            if isinstance(self._source, bytes):
                writer.write(self._source)
                await writer.drain()
            else:
                while chunk := await asyncio.to_thread(self._source.read, CHUNK):
                    writer.write(chunk)
                    await writer.drain()
            transport.write_eof()
        except ConnectionError:
            pass  # the command has ended, or closed it
        except asyncio.CancelledError:
            transport.abort()
            raise


class CommandStreams:
    """The three streams of one command."""

    def __init__(self, source: bytes | IO[bytes], max_output: int, sinks: Mapping[int, OutputSink]) -> None:
        self.stdin = InputPipe(source)
        self.stdout = OutputPipe(STDOUT, max_output, sinks.get(STDOUT))
        self.stderr = OutputPipe(STDERR, max_output, sinks.get(STDERR))
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def inside(self) -> tuple[int, int, int]:
        """The ends of the process that runs the command."""
        return self.stdin.inside, self.stdout.inside, self.stderr.inside

    def connect(self) -> None:
        """Begins to write and read; to be called once, when the process has its ends or could not be started."""
        for descriptor in self.inside:
            os.close(descriptor)
        self._tasks = [
            asyncio.create_task(self.stdin.write(), name="sandbox stdin"),
            asyncio.create_task(self.stdout.read(), name="sandbox stdout"),
            asyncio.create_task(self.stderr.read(), name="sandbox stderr"),
        ]

    async def drain(self) -> None:
        """Reads what is left when the command has ended; other processes in the sandbox may hold the pipes open for
        ever. Raises what a sink has raised."""
        _, reading = await asyncio.wait(self._tasks[1:], timeout=LAST_WORDS_S)
        while reading and (self.stdout.is_handing_on or self.stderr.is_handing_on):
            _, reading = await asyncio.wait(reading, timeout=LAST_WORDS_S)
        for task in self._tasks[1:]:
            if task.done():
                task.result()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def is_truncated(self) -> bool:
        return self.stdout.dropped_bytes + self.stderr.dropped_bytes > 0


async def ended_in_time(process: GroupLeader, limit_s: float) -> bool:
    """Waits for the end of the process; returns whether it came within the limit."""
    try:
        async with asyncio.timeout(limit_s):
            await process.wait()
    except TimeoutError:
        return False
    return True
