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

from palestra.environments.sandbox import process
from palestra.gym.errors import GymError
from palestra.gym.grading.program_child import NO_SANDBOX
from palestra.util.renamed import renamed

CHILD = "palestra.gym.grading.program_child"
MAX_ANSWER = 64 * 1024 * 1024
START_S = 20.0


class Program(Struct, frozen=True, kw_only=True):
    source: str
    inputs: list[str]
    function: str | None = None
    """Called with an input's lines as arguments; without it, the program reads the input and prints."""
    test_s: float = 10.0
    memory_bytes: int = 1024**3
    are_trusted: bool = False
    """Run it though the kernel here has no filter to hold it."""


class NoSandbox(GymError):
    """Nothing here keeps a program from doing harm."""


class ProgramOutcome(Struct, frozen=True):
    """What came of one input."""

    printed: str = ""
    result: Any = None
    error: str | None = None


class ProgramSandbox(Protocol):
    """Something that runs programs of strangers. A setting names one: `sandbox: module:Class`."""

    async def run(self, program: Program) -> list[ProgramOutcome]:
        """One for each input, in order; those that were not reached have an error. Never raises for what the program
        does; NoWalls where it cannot be held."""
        ...


class JailSandbox:
    """A child process that the kernel lets do nothing but compute, with limits on time and memory."""

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
    """Ours where none is named. Raises ImportError, AttributeError."""
    if name is None:
        return JailSandbox(at_once)
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)()


def _outcomes(said: process.ChildAnswer, count: int) -> list[ProgramOutcome]:
    """A program can write into the pipe, too: what is no outcome ends them."""
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
