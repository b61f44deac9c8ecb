"""A server for one run: `palestra serve` as a child that goes when the run goes.

Owns: starting it, waiting until it is ready, noticing its end. Never touches: what is asked of it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from palestra.config.cores import usable_cores
from palestra.training.guard import guarded
from palestra.training.policy import PolicyError

READY = "Palestra is ready at "
STOP_S = 20.0


@asynccontextmanager
async def own_server(model: str, name: str, state: Path, log: Path, *, device: str) -> AsyncIterator[str]:
    """Its address. `model`: a folder. Raises PolicyError with the server's own words when it cannot start, and in the
    middle of whatever is being done when it ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "palestra.cli", "serve", "--model", model, "--name", name, "--port", "0"]
    command += ["--state", str(state), "--device", device, "--with-parent"]
    if device == "cpu":
        # One core is left to the trainer and its environments. On two cores the demo takes as long with one thread as
        # with two, and on a busy machine a fraction of it: two threads wait for each other at every product.
        command.append(f"models.0.threads={max(1, usable_cores() - 1)}")
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,  # closes when we end, however we end: --with-parent
            stdout=asyncio.subprocess.PIPE,
            stderr=out,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # ctrl-c is the run's, which says goodbye to the server
        )
    try:
        url = await _wait_ready(process, log)
        with guarded(_until_ended(process, log)):
            yield url
    finally:
        await _stop(process)


async def _until_ended(process: asyncio.subprocess.Process, log: Path) -> str:
    code = await process.wait()
    return f"the run's server ended with code {code}; its last words are in {log}"


async def _wait_ready(process: asyncio.subprocess.Process, log: Path) -> str:
    assert process.stdout is not None
    async for line in process.stdout:
        text = line.decode(errors="replace")
        if READY in text:
            return text.partition(READY)[2].split()[0]
    await process.wait()
    reason = _last_error(log) or f"exit code {process.returncode}; see {log}"
    raise PolicyError(f"the server for this run did not start: {reason}")


def _last_error(log: Path) -> str | None:
    said = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error:")]
    return said[-1].removeprefix("error: ") if said else None


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()
