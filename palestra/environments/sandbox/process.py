"""A process in the sandbox: started, sent one question, timed, and ended.

Owns: the process, its time, how much it may answer. Never touches: the question, what the answer means; the module that
runs there enters the sandbox itself, with `jail.enter`, when it has loaded what it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

import palestra
from palestra.util.processes import PIPE, kill, spawn

SANDBOX = "palestra.environments.sandbox"
BOOT = """
import importlib, sys, types
root, module = sys.argv[1:3]
for package in sys.argv[3:]:
    name = ""
    for part in package.split("."):
        path = f"{path}/{part}" if name else root
        name = f"{name}.{part}".lstrip(".")
        if name not in sys.modules:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [path]
importlib.import_module(module).main()
"""
"""Loads only the module and its neighbours: the packages around them would import what is not needed."""


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


async def started(module: str) -> asyncio.subprocess.Process:
    packages = (module.rpartition(".")[0], SANDBOX)
    return await spawn(
        *(sys.executable, "-I", "-S", "-c", BOOT, Path(palestra.__file__).parent, module, *packages),
        stdin=PIPE,
        stdout=PIPE,
        env={},
        cwd="/",
    )


async def _talk(process: asyncio.subprocess.Process, question: bytes, answer: bytearray, max_answer: int) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError):  # it died before it read everything: there will be no answer
        process.stdin.write(question)
        await process.stdin.drain()
        process.stdin.close()
    while len(answer) <= max_answer and (more := await process.stdout.read(64 * 1024)):
        answer += more
