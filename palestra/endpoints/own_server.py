"""A server for one run: `palestra serve` as a child process that ends with the run.

Owns: its command. Never touches: requests to it; starting and ending (`own_process`).
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from palestra.config.cores import usable_cores
from palestra.rollouts.policy_sampler import PolicyError
from palestra.util.own_process import own_process

READY = "Palestra is ready at "


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
) -> AsyncIterator[str]:
    """Starts a server and gives its address. `model` is a folder, `runs` what its dashboard shows, `settings` are more
    of the server's config. Raises PolicyError if it cannot start, and when it ends."""
    command = [sys.executable, "-m", "palestra.cli", "serve", "--model", model, "--name", name, "--port", "0"]
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
