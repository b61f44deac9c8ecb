"""Runs programs that models wrote.

Owns: the interface of a sandbox, the one that needs only Linux, finding others by name. Never touches: whether the
outcome is right.
"""

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
from palestra.sandbox.compute_only import process
from palestra.util.renamed import renamed

CHILD = "palestra.gym.grading.program_child"
MAX_ANSWER = 64 * 1024 * 1024
START_S = 20.0


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
    """There is nothing here that keeps a program from doing harm."""


class ProgramOutcome(Struct, frozen=True):
    """The outcome of one input."""

    printed: str = ""
    result: Any = None
    error: str | None = None


class ProgramSandbox(Protocol):
    """Runs untrusted programs. A setting names one: `sandbox: module:Class`."""

    async def run(self, program: Program) -> list[ProgramOutcome]:
        """Returns one outcome for each input, in order; those that were not reached have an error. It never raises
        because of the program; it raises NoSandbox if the program cannot be restricted."""
        ...


class JailSandbox:
    """A child process that the kernel allows only to compute, with limits on time and memory."""

    def __init__(self, at_once: int | None = None) -> None:
        self._slots = asyncio.Semaphore(at_once or os.cpu_count() or 1)

    async def run(self, program: Program) -> list[ProgramOutcome]:
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
        question = msgspec.json.encode(header) + b"\n"
        async with self._slots:
            said = await process.run_sandboxed(CHILD, question, limit_s=total_s + START_S, max_answer=MAX_ANSWER)
        if said.status == NO_SANDBOX and not said.answer:
            raise NoSandbox(
                "this kernel cannot filter system calls (that needs Linux with seccomp), so programs of a "
                "model would run unconfined; name a sandbox (`sandbox: module:Class`), or set `trust_programs: true`"
            )
        return _outcomes(said, len(program.inputs))


def sandbox_named(name: str | None, at_once: int | None) -> ProgramSandbox:
    """Returns the named sandbox, or ours. Raises ImportError, AttributeError."""
    if name is None:
        return JailSandbox(at_once)
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)()


def _outcomes(said: process.ChildAnswer, count: int) -> list[ProgramOutcome]:
    """Converts the child's answer. A program can write into the pipe, too: the first invalid outcome ends the list."""
    found: list[ProgramOutcome] = []
    for line in said.answer.splitlines()[:count]:
        try:
            found.append(msgspec.json.decode(line, type=ProgramOutcome))
        except (msgspec.DecodeError, UnicodeDecodeError):
            break
    return found + [ProgramOutcome(error=f"not reached: the program's process ended ({said.status})")] * (
        count - len(found)
    )


if not TYPE_CHECKING:  # type checkers know the new names only
    __getattr__ = renamed(__name__, Outcome="ProgramOutcome", Sandbox="ProgramSandbox", Jail="JailSandbox")
