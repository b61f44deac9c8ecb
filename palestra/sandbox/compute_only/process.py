"""A process in the sandbox: started, sent one question, timed, and ended."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from palestra.sandbox import lean_python
from palestra.util.processes import PIPE, kill, spawn

PACKAGE = "palestra.sandbox.compute_only"


@dataclass(frozen=True, slots=True)
class ChildAnswer:
    answer: bytes
    """The answer, as much as arrived."""
    status: int | None
    is_late: bool


async def run_sandboxed(module: str, question: bytes, *, limit_s: float, max_answer: int) -> ChildAnswer:
    """`module` has a `main`, reads the question from its standard input and writes to its standard output. Whatever
    happens here, even a cancellation, the process has ended afterwards."""
    process = await started(module)
    answer, is_late = bytearray(), False
    try:
        async with asyncio.timeout(limit_s):
            await _talk(process, question, answer, max_answer)
    except TimeoutError:
        is_late = True
    finally:
        await kill(process)
    return ChildAnswer(bytes(answer), process.returncode, is_late)


async def started(module: str, max_line: int = 1 << 16) -> asyncio.subprocess.Process:
    command = lean_python.command_of(module, PACKAGE)
    return await spawn(*command, stdin=PIPE, stdout=PIPE, env={}, cwd="/", limit=max_line)


async def _talk(process: asyncio.subprocess.Process, question: bytes, answer: bytearray, max_answer: int) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError):  # it died before it read everything: there will be no answer
        process.stdin.write(question)
        await process.stdin.drain()
        process.stdin.close()
    while len(answer) <= max_answer and (more := await process.stdout.read(64 * 1024)):
        answer += more
