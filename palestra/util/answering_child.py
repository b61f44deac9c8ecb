"""A child process that answers one question at a time, in order: started when it is first asked, and again if it
died."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import Process
from typing import BinaryIO

from palestra.util.processes import PIPE, kill, spawn

LENGTH_BYTES = 8


class ChildDied(Exception):
    """The process ended before it answered."""


class ChildTooLate(ChildDied):
    """The child did not answer in time, and was ended."""


class AnsweringChild:
    def __init__(self, module: str, first_message: bytes | None = None):
        """`module` is run with `-m`; it reads and writes messages as `read_message` and `delimited` do. The first
        message goes to every process that is started, and is not answered."""
        self._module, self._first = module, first_message
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        """Protects the process, which answers one question at a time, in order."""

    async def ask(self, question: bytes, limit_s: float | None = None) -> bytes:
        """Raises ChildDied; the next question goes to a new process then."""
        async with self._turn:
            try:
                async with asyncio.timeout(limit_s):
                    return await self._talk(delimited(question))
            except (asyncio.IncompleteReadError, ConnectionError):
                await self._end()
                raise ChildDied from None
            except TimeoutError:
                await self._end()
                raise ChildTooLate from None
            except BaseException:
                await self._end()  # its answer may still come, and would be taken for the next one's
                raise

    async def close(self) -> None:
        async with self._turn:
            await self._end()

    async def _talk(self, data: bytes) -> bytes:
        if self._process is None or self._process.returncode is not None:
            self._process = await spawn(sys.executable, "-m", self._module, stdin=PIPE, stdout=PIPE, stderr=None)
            data = data if self._first is None else delimited(self._first) + data
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None
        assert sink is not None
        sink.write(data)
        await sink.drain()
        length = int.from_bytes(await source.readexactly(LENGTH_BYTES), "big")
        return await source.readexactly(length)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await kill(process)


def read_message(source: BinaryIO) -> bytes | None:
    """Reads a message. None at the end."""
    length = source.read(LENGTH_BYTES)
    return source.read(int.from_bytes(length, "big")) if length else None


def delimited(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "big") + data
