"""A gym for a command: one that runs already, or one that is started for the command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import rich_click as click

from palestra.cli.gym.commands import HEAD, head_options, say, source_options, sources

if TYPE_CHECKING:
    from palestra.gym.supervisor import Supervisor

F = TypeVar("F", bound=Callable[..., Any])

SOURCES = ("files", "roots", "overrides", "model", "model_url", "model_api_key")


def gym_options(command: F) -> F:
    """`--server` and its key, and all options that describe a gym to be started; they are the `**given` of
    `running_gym`."""
    return head_options(default=None, hint=f"  [{HEAD}]")(source_options(command))


@asynccontextmanager
async def running_gym(server: str | None = None, **given: Any) -> AsyncIterator[str]:
    """Gives the address of the gym's head server. With config files, a gym is started that lives as long as this block;
    the block is cancelled if one of its servers cannot be kept running. Raises GymError."""
    from palestra.gym.config import ReservedPorts, load_gym
    from palestra.gym.supervisor import Supervisor

    if not given.get("files"):
        if given.get("overrides"):
            raise click.UsageError(
                f"{given['overrides'][0]}: settings are possible only for a gym that this command starts (-c FILE)"
            )
        yield server or HEAD
        return
    if server:
        raise click.UsageError("give either --server for a running gym, or -c for one to be started")
    with ReservedPorts() as ports:
        config = load_gym(sources(**given), ports=ports, report=say)
        async with Supervisor(config, ports, say) as supervisor:
            await supervisor.ready()
            async with _watched(supervisor):
                yield supervisor.head_url


@asynccontextmanager
async def _watched(supervisor: Supervisor) -> AsyncIterator[None]:
    from palestra.gym.errors import GymError

    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(supervisor.run(), name="gym-watch")
            try:
                yield
            finally:
                watching.cancel()
    except* GymError as errors:
        raise errors.exceptions[0] from None
