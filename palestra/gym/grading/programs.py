"""Runs programs that models wrote."""

from __future__ import annotations

import asyncio
import importlib
import math
import os
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import Struct

from palestra.gym.errors import GymError
from palestra.gym.grading.program_child import NO_SANDBOX
from palestra.sandbox import SandboxLimits, SandboxSpec, backend, lean_python
from palestra.sandbox.compute_only import process
from palestra.util.renamed import renamed

CHILD = "palestra.gym.grading.program_child"
MAX_ANSWER = 64 * 1024 * 1024
START_S = 20.0
CHILD_IMPORTS = (
    "palestra.sandbox.compute_only.jail",
    "palestra.sandbox.compute_only.python_modules",
    "palestra.sandbox.seccomp",
    "palestra.util.json_types",
)
INSIDE = "grader"
"""The folder of a sandbox, below its working folder, that has the child's files."""
NO_PYTHON = 127
ROOM_FOR_PYTHON = 256 * 1024**2
"""Memory of a sandbox beside what the program may take."""


class Program(Struct, frozen=True, kw_only=True):
    source: str
    inputs: list[str]
    function: str | None = None
    """The function to call with an input's lines as arguments; without it, the program reads the input and prints."""
    test_s: float = 10.0
    memory_bytes: int = 1024**3
    are_trusted: bool = False
    """Run it although the kernel here has no filter to restrict it."""


class NoSandbox(GymError):
    """This machine has no sandbox in which a program could run safely."""


class ProgramOutcome(Struct, frozen=True):
    """The outcome of one input."""

    printed: str = ""
    result: Any = None
    error: str | None = None


class ProgramSandbox(Protocol):
    """Runs untrusted programs. A setting names one: `sandbox: local`, or another backend, or `module:Class`."""

    async def run(self, program: Program) -> list[ProgramOutcome]:
        """Returns one outcome for each input, in order; those that were not reached have an error. It never raises
        because of the program; it raises NoSandbox if the program cannot be restricted."""
        ...


class JailSandbox:
    """A child process that the kernel allows only to compute, with limits on time and memory."""

    def __init__(self, at_once: int | None = None) -> None:
        self._slots = asyncio.Semaphore(at_once or os.cpu_count() or 1)

    async def run(self, program: Program) -> list[ProgramOutcome]:
        question, limit_s = _question(program)
        async with self._slots:
            outcome = await process.run_sandboxed(CHILD, question, limit_s=limit_s, max_answer=MAX_ANSWER)
        if outcome.status == NO_SANDBOX and not outcome.answer:
            raise NoSandbox(
                "this kernel cannot filter system calls (that needs Linux with seccomp), so programs of a "
                "model would run unconfined; name a sandbox (`sandbox: docker`), or set `trust_programs: true`"
            )
        return _outcomes(outcome.answer, outcome.status, len(program.inputs))


class BackendProgramSandbox:
    """The same child in a sandbox of its own for each program. The child still closes itself off: two walls."""

    def __init__(self, name: str, at_once: int | None = None) -> None:
        """Raises SandboxError if there is no backend of that name."""
        self.name, self._backend = name, backend(name)
        self._slots = asyncio.Semaphore(at_once or os.cpu_count() or 1)

    async def run(self, program: Program) -> list[ProgramOutcome]:
        question, limit_s = _question(program)
        command, files = lean_python.carried(CHILD, *CHILD_IMPORTS, folder=INSIDE)
        limits = SandboxLimits(memory_bytes=program.memory_bytes + ROOM_FOR_PYTHON)
        async with self._slots:
            if problem := self._backend.problem():
                raise NoSandbox(f"programs cannot run in {self.name}: {problem}")
            async with self._backend(SandboxSpec(files=files, limits=limits)) as box:
                outcome = await box.exec(command, stdin=question, limit_s=limit_s, max_output=MAX_ANSWER)
        if outcome.status == NO_PYTHON:
            raise NoSandbox(f"there is no python3 in the sandbox {self.name}, which programs need")
        if outcome.status == NO_SANDBOX and not outcome.stdout:
            raise NoSandbox(f"the kernel below {self.name} cannot filter system calls; set `trust_programs: true`")
        return _outcomes(outcome.stdout, outcome.status, len(program.inputs))


def sandbox_named(name: str | None, at_once: int | None) -> ProgramSandbox:
    """Returns the named sandbox, or the one that only computes. Raises ImportError, AttributeError, SandboxError."""
    if name is None:
        return JailSandbox(at_once)
    module, colon, attribute = name.partition(":")
    if not colon:
        return BackendProgramSandbox(name, at_once)
    return getattr(importlib.import_module(module), attribute)()


def _question(program: Program) -> tuple[bytes, float]:
    """Returns what the child reads, and the seconds it may take."""
    total_s = program.test_s * len(program.inputs)
    header = {
        "source": program.source,
        "inputs": program.inputs,
        "function": program.function,
        "test_s": program.test_s,
        "memory_bytes": program.memory_bytes,
        "cpu_s": math.ceil(total_s) + 5,
        "are_trusted": program.are_trusted,
    }
    return msgspec.json.encode(header) + b"\n", total_s + START_S


def _outcomes(answer: bytes, status: int | None, count: int) -> list[ProgramOutcome]:
    """Converts the child's answer. A program can write into the pipe, too: the first invalid outcome ends the list."""
    found: list[ProgramOutcome] = []
    for line in answer.splitlines()[:count]:
        try:
            found.append(msgspec.json.decode(line, type=ProgramOutcome))
        except (msgspec.DecodeError, UnicodeDecodeError):
            break
    return found + [ProgramOutcome(error=f"not reached: the program's process ended ({status})")] * (count - len(found))


if not TYPE_CHECKING:  # type checkers know the new names only
    __getattr__ = renamed(__name__, Outcome="ProgramOutcome", Sandbox="ProgramSandbox", Jail="JailSandbox")
