"""A server for one run, or for several: `palestra serve` as a child process that ends with its work."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from palestra.config.cores import usable_cores
from palestra.rollouts.policy_sampler import PolicyError
from palestra.util.own_process import guarded, own_process

READY = "Palestra is ready at "
STARTS = 5
"""A server that has ended so often, each time soon after its start, is given up."""
STABLE_S = 60.0


@asynccontextmanager
async def own_server(
    model: str,
    name: str,
    state: Path,
    log: Path,
    note: Callable[[str], None],
    *,
    device: str,
    weights: str | None = None,
    runs: Path | None = None,
    settings: Sequence[str] = (),
    port: int = 0,
) -> AsyncIterator[str]:
    """Starts a server and gives its address. `model` is a folder, `runs` what its dashboard shows, `settings` are more
    of the server's config. Raises PolicyError if it cannot start, and when it ends."""
    command = [sys.executable, "-m", "palestra.cli", "serve", "--model", model, "--name", name, "--port", str(port)]
    command += ["--state", str(state), "--device", device, "--with-parent"]
    if weights is not None:
        command += ["--weights", weights]
    if runs is not None:
        command += ["--runs", str(runs)]
    if not device.startswith("cuda"):
        # One core is left to the trainer and its environments. On two cores the demo takes as long with one thread as
        # with two, and much less on a busy machine: two threads wait for each other at every matrix product.
        command.append(f"models.0.threads={max(1, usable_cores() - 1)}")
    command += settings
    note(f"loading {name}")
    async with own_process(command, READY, log, f"the server of {name}", note, PolicyError) as url:
        yield url


@asynccontextmanager
async def lasting_server(
    start: Callable[[int], AbstractAsyncContextManager[str]], note: Callable[[str], None]
) -> AsyncIterator[str]:
    """Keeps an `own_server` at one address: when it ends, `start` is called with its port again, and clients that try
    again notice a pause. Raises PolicyError if it cannot start."""
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    keeping = asyncio.create_task(_keep_up(start, note, address), name="server")
    try:
        with guarded(_result(keeping), PolicyError):
            yield await address
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def _keep_up(
    start: Callable[[int], AbstractAsyncContextManager[str]], note: Callable[[str], None], address: asyncio.Future[str]
) -> str:
    """Returns why the server is given up. The first start is tried again too: after a kill of everything, the server
    before may still be on its way out."""
    port = failures = 0
    clock = asyncio.get_running_loop().time
    while True:
        began = clock()
        try:
            async with start(port) as url:
                port = urlsplit(url).port or 0
                if not address.done():
                    address.set_result(url)
                await asyncio.Event().wait()
        except PolicyError as error:
            failures = failures + 1 if clock() - began < STABLE_S else 1
            if failures == STARTS:
                return str(error)
            note(f"{error}; it is started again")
            await asyncio.sleep(2**failures)


async def _result(task: asyncio.Task[str]) -> str:
    return await asyncio.shield(task)
