"""A process that work starts for itself and that ends with it: a run's server, its gyms."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from palestra.util import processes
from palestra.util.log_files import last_error

STOP_S = 20.0
NOTE_EVERY_S = 5


@contextmanager
def guarded(watch: Coroutine[Any, Any, str], error: type[Exception]) -> Iterator[None]:
    """Runs the block until `watch` returns: then it is cancelled and raises `error` with the returned text as its
    message."""
    task = asyncio.current_task()
    assert task is not None
    watching = asyncio.create_task(watch, name="guard")

    def end(_: asyncio.Task[str]) -> None:
        task.cancel()

    watching.add_done_callback(end)
    try:
        yield
    except asyncio.CancelledError:
        if not watching.done():
            raise
        task.uncancel()
        raise error(watching.result()) from None
    finally:
        watching.remove_done_callback(end)
        watching.cancel()


@asynccontextmanager
async def own_process(
    command: Sequence[str],
    ready: str,
    log: Path,
    name: str,
    note: Callable[[str], None],
    error: type[Exception],
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[str]:
    """Starts a process and gives what it prints after `ready`, which is its address. Raises `error` with its output if
    it cannot start, and cancels the block with `error` when it ends. `note` gets a line every few seconds until it is
    ready."""
    note(f"starting {name}; its log is {log}")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        began_at = out.tell()
        process = await processes.spawn(
            *command,
            # it closes when this process ends for whatever reason; the child notices (--with-parent)
            stdin=processes.PIPE,
            stdout=processes.PIPE,
            stderr=out,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
    try:
        with _noting(f"{name} is starting", note):
            ready_line = await _wait_ready(process, ready, name, log, began_at, error)
        note(ready_line)
        address = ready_line.partition(ready)[2].split()[0]
        with guarded(_until_ended(process, name, log), error):
            yield address
    finally:
        await processes.stop(process, STOP_S)


@contextmanager
def _noting(what: str, note: Callable[[str], None]) -> Iterator[None]:
    async def tell() -> None:
        for seconds in count(NOTE_EVERY_S, NOTE_EVERY_S):
            await asyncio.sleep(NOTE_EVERY_S)
            note(f"{what}, {seconds} s so far")

    telling = asyncio.create_task(tell(), name=what)
    try:
        yield
    finally:
        telling.cancel()


async def _until_ended(process: Process, name: str, log: Path) -> str:
    code = await process.wait()
    return f"{name} ended with code {code}; see its log {log}"


async def _wait_ready(process: Process, ready: str, name: str, log: Path, began_at: int, error: type[Exception]) -> str:
    assert process.stdout is not None
    async for line in process.stdout:
        text = line.decode(errors="replace")
        if ready in text:
            return text.strip()
    await process.wait()
    reason = last_error(log, began_at) or f"exit code {process.returncode}; see {log}"
    raise error(f"{name} did not start: {reason}")
