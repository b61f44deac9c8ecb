"""A server for one run, or for several: `palestra serve` as a child process that ends with its work."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from palestra.config.cores import usable_cores
from palestra.rollouts.policy_sampler import PolicyError
from palestra.util import processes
from palestra.util.backoff import Backoff
from palestra.util.figures import size_text
from palestra.util.own_process import STOP_S, guarded, own_process

READY = "Palestra is ready at "
STARTS = 5
"""A server that has ended so often, each time soon after its start, is given up."""
STABLE_S = 60.0
RESTARTS = Backoff(2.0, 60.0)
LARGE_BYTES = 1 << 30
"""A smaller model fits anywhere: it is not planned before it is loaded, which takes seconds."""


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
    memory: str | None = None,
    runs: Path | None = None,
    settings: Sequence[str] = (),
    port: int = 0,
) -> AsyncIterator[str]:
    """Starts a server and gives its address. `model` is a folder, `runs` what its dashboard shows, `settings` are more
    of the server's config. A large model that does not fit the device, or `memory` of it, as it is gets settings with
    which it fits. Raises PolicyError if the server cannot start, and when it ends."""
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
    if memory is not None or _size(Path(model)) >= LARGE_BYTES:
        command += await _fitting_settings(command, name, memory, note)
    note(f"loading {name}")
    async with own_process(command, READY, log, f"the server of {name}", note, PolicyError) as url:
        yield url


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


async def _fitting_settings(
    command: Sequence[str], name: str, memory: str | None, note: Callable[[str], None]
) -> list[str]:
    """The nearest settings with which the model fits: none where it does as it is, or cannot be planned."""
    asked = [*command, "--dry-run", "--json", *(() if memory is None else ("--memory", memory))]
    process = await processes.spawn(*asked, stdout=processes.PIPE, stderr=processes.PIPE)
    try:
        printed, _ = await process.communicate()
    finally:
        await processes.stop(process, STOP_S)
    try:
        plan = json.loads(printed)
    except ValueError:
        return []  # the server's own start says what is wrong
    if not plan["too_full"]:
        return []
    room = " and ".join(f"{size_text(plan['memory'][device])} of {device}" for device in plan["too_full"])
    settings = plan["advice"].get(name)
    if not settings or any(".gpus=" in one for one in settings):
        raise PolicyError(f"{name} needs more than the {room}; choose a smaller model, or a larger device")
    note(f"{name} fits the {room} with {' '.join(one.removeprefix('models.0.') for one in settings)}")
    return settings


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
            await asyncio.sleep(RESTARTS.after(failures))


async def _result(task: asyncio.Task[str]) -> str:
    return await asyncio.shield(task)
