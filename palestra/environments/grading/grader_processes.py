"""Does work that may hang or use too much memory in child processes with a time limit.

A child is a module that answers each line of JSON on its input with one on its output.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from palestra.util.processes import PIPE, kill, spawn

MAX_LINE = 16 * 1024 * 1024
START_S = 60.0  # sympy takes seconds to import on a busy machine


class ChildError(Exception):
    """The child did not answer in time, or died; the message says why."""


class NoChildError(Exception):
    """No child can be started. This says nothing about the question, so it does not count as a wrong answer."""


class GraderProcesses:
    """A pool of at most `count` processes, which are started when needed and kept for the next question."""

    def __init__(self, module: str, count: int | None = None, python: Path | None = None) -> None:
        """`python` is another interpreter, in which the module runs as a script, without this package."""
        self._module = module
        self._command = [sys.executable, "-m", module] if python is None else [str(python), script_of(module)]
        self._slots = asyncio.Semaphore(count or os.cpu_count() or 1)
        self._idle: list[asyncio.subprocess.Process] = []

    async def request(self, question: object, limit_s: float) -> Any:
        """Raises ChildError; the child is then ended, and the next question gets another one. Raises NoChildError."""
        try:
            encoded = msgspec.json.encode(question)
        except (TypeError, ValueError) as error:  # lone surrogates
            raise ChildError(f"the request cannot be sent: {error}") from None
        async with self._slots:
            child = self._idle.pop() if self._idle else await self._start()
            try:
                async with asyncio.timeout(limit_s):
                    answer = await _exchange(child, encoded)
            except TimeoutError:
                await kill(child)
                raise ChildError(f"no answer within {limit_s:g} s") from None
            except BaseException:  # also when cancelled: the child may still be working
                await kill(child)
                raise
            self._idle.append(child)
            return answer

    async def close(self) -> None:
        while self._idle:
            await kill(self._idle.pop())

    async def _start(self) -> asyncio.subprocess.Process:
        child = await spawn(*self._command, stdin=PIPE, stdout=PIPE, limit=MAX_LINE)
        try:
            async with asyncio.timeout(START_S):
                await _line(child)  # the child writes a line when it has imported all it needs
        except (ChildError, TimeoutError) as error:
            await kill(child)
            raise NoChildError(f"{self._module} does not start: {error or f'not within {START_S:g} s'}") from error
        except BaseException:  # when cancelled: otherwise it would never end
            await kill(child)
            raise
        return child


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, Path | None], GraderProcesses]] = (
    WeakKeyDictionary()
)
_closers: set[asyncio.Task[None]] = set()


def shared_graders(module: str, python: Path | None = None) -> GraderProcesses:
    """Returns the processes that all episodes of this event loop share. They end with the loop."""
    known = _shared.setdefault(asyncio.get_running_loop(), {})
    if (found := known.get((module, python))) is None:
        found = known[module, python] = GraderProcesses(module, python=python)
        closer = asyncio.create_task(_closed_at_the_end(found.close), name=f"processes of {module}")
        _closers.add(closer)
        closer.add_done_callback(_closers.discard)
    return found


async def _closed_at_the_end(close: Callable[[], Any]) -> None:
    """`asyncio.run` cancels the tasks that are left, and waits for them."""
    try:
        await asyncio.Event().wait()
    finally:
        await close()


def script_of(module: str) -> str:
    """Returns the file of a module, without importing it."""
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    return found.origin


async def _exchange(child: asyncio.subprocess.Process, question: bytes) -> Any:
    assert child.stdin is not None
    try:
        child.stdin.write(question + b"\n")
        await child.stdin.drain()
    except ConnectionError:
        pass  # its last output says more
    return msgspec.json.decode(await _line(child))


async def _line(child: asyncio.subprocess.Process) -> bytes:
    assert child.stdout is not None
    try:
        line = await child.stdout.readline()
    except ValueError:
        raise ChildError(f"the answer has more than {MAX_LINE} bytes") from None
    if not line.endswith(b"\n"):
        raise ChildError(f"the child ended with code {await child.wait()}")
    return line
