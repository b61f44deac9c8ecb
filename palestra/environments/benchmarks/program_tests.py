"""Runs the tests of a task on a program that a model wrote: two processes, each behind a wall, and messages between.

The tests run in one, the program in the other, and whatever the program does to its own process (ending it, changing
`assert`, looking around), the verdict is said by the other one. Expected results never reach the program.
"""

from __future__ import annotations

import asyncio
import math
import os
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Struct

from palestra.environments.benchmarks.program_child import NO_SANDBOX
from palestra.sandbox.compute_only.process import started
from palestra.util.processes import kill

PROGRAM = "palestra.environments.benchmarks.program_child"
CHECK = "palestra.environments.benchmarks.check_child"
MAX_LINE = 16 * 1024 * 1024
START_S = 60.0
MEMORY_BYTES = 1024**3


class ProgramTests(Struct, frozen=True, kw_only=True):
    """The tests of a task, as its file has them."""

    setup: str
    """Runs before the tests, in their process."""
    tests: str
    function: str | None = None
    """The program's function that tests call. None: all names that are not made elsewhere."""
    limit_s: float = 10.0


class ProgramVerdict(Struct, frozen=True):
    passed: bool
    error: str | None = None
    """Why it has not passed."""


class CannotJudge(Exception):
    """The tests could not be run: this says nothing about the program."""


class _FromTests(Struct, frozen=True):
    call: str | None = None
    passed: bool | None = None
    error: str | None = None
    broken: str | None = None


_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def run_tests(program: str, tests: ProgramTests) -> ProgramVerdict:
    """Never raises because of the program. Raises CannotJudge."""
    slots = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1))
    async with slots:
        return await _run(program, tests)


async def _run(program: str, tests: ProgramTests) -> ProgramVerdict:
    limits = {"memory_bytes": MEMORY_BYTES, "cpu_s": math.ceil(tests.limit_s) + 5}
    processes: list[asyncio.subprocess.Process] = []
    try:
        for module, header in ((PROGRAM, {"source": program}), (CHECK, msgspec.structs.asdict(tests))):
            processes.append(await started(module, MAX_LINE))
            _send(processes[-1], msgspec.json.encode({**header, **limits}) + b"\n")
        for process in processes:
            await _wait_until_ready(process)
        async with asyncio.timeout(tests.limit_s):
            return await _conversation(*processes)
    except TimeoutError:
        return ProgramVerdict(False, f"the program did not end within {tests.limit_s:g} s")
    except (TypeError, ValueError) as error:  # lone surrogates
        return ProgramVerdict(False, f"the program cannot be written down: {error}")
    finally:
        for process in processes:
            await kill(process)


async def _wait_until_ready(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(START_S):
            is_ready = bool(await _line(process))
    except TimeoutError:
        is_ready = False
    if not is_ready:
        await kill(process)
        why = "this kernel cannot filter system calls (that needs Linux with seccomp)"
        raise CannotJudge(
            f"programs of a model cannot be run here: {why}"
            if process.returncode == NO_SANDBOX
            else f"a process for programs did not start ({process.returncode})"
        )


async def _conversation(program: asyncio.subprocess.Process, check: asyncio.subprocess.Process) -> ProgramVerdict:
    while line := await _line(check):
        message = msgspec.json.decode(line, type=_FromTests)
        if message.broken is not None:
            raise CannotJudge(f"the tests of the task do not run: {message.broken}")
        if message.passed is not None:
            return ProgramVerdict(message.passed, message.error)
        _send(program, line)
        _send(check, await _line(program) or b'{"error": ["", "the process of the program has ended"]}\n')
    return ProgramVerdict(False, "the tests' process ended: what the program returned is too much for it")


def _send(process: asyncio.subprocess.Process, line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)  # the other side reads a line before it writes one, so no buffer grows


async def _line(process: asyncio.subprocess.Process) -> bytes:
    """Returns a line, or nothing if the process has ended or writes what is no line."""
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
    except ValueError:
        return b""
    return line if line.endswith(b"\n") else b""
