"""The gyms of a run: those it starts, those that run already, and where their agents are."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from msgspec import Struct

from palestra.config.api_key import api_key
from palestra.config.environment_entries import EnvironmentEntry, GymEntry, GymStart, gym_entry
from palestra.environments.gym.directory import ServerDirectory
from palestra.environments.gym.errors import NoGym, UnknownAgent
from palestra.net.chat_apis import endpoint_url
from palestra.net.http_client import HttpClient
from palestra.rollouts.policy_sampler import PolicyError
from palestra.rollouts.sources import RolloutSourceError
from palestra.types.gym import is_gym
from palestra.util.own_process import own_process

READY = "The gym is ready at "
KEY_VARIABLE = "PALESTRA_POLICY_KEY"


class PolicyAddress(Struct, frozen=True):
    """Where a gym's model server finds the policy."""

    url: str
    """Address of the run's server."""
    alias: str | None
    """An alias that follows the run's weights, for agents that do not pass on the model that a row names."""
    base_model: str
    key: str | None = None
    """None: the key of the run."""

    @property
    def api(self) -> str:
        return endpoint_url(self.url)


@asynccontextmanager
async def open_gyms(
    entries: Iterable[EnvironmentEntry],
    policy: PolicyAddress,
    logs: Path,
    client: HttpClient,
    note: Callable[[str], None],
) -> AsyncIterator[dict[str, ServerDirectory]]:
    """Opens gyms by the entry's name. Raises PolicyError if one cannot be started, RolloutSourceError if one does not
    answer."""
    started: dict[GymStart, str] = {}
    gyms: dict[str, ServerDirectory] = {}
    async with AsyncExitStack() as stack:
        for entry in entries:
            if not is_gym(entry.name):
                continue
            known = gym_entry(entry)
            if known.head is None and known.start not in started:
                log = logs / f"gym-{len(started)}.log"
                started[known.start] = await stack.enter_async_context(own_gym(known.start, policy, log, note))
            gyms[entry.name] = await _reached(known, client, known.head or started[known.start])
        yield gyms


@asynccontextmanager
async def own_gym(start: GymStart, policy: PolicyAddress, log: Path, note: Callable[[str], None]) -> AsyncIterator[str]:
    """Starts a gym and gives the address of its head server."""
    command = [sys.executable, "-m", "palestra.cli", "gym", "run", "--with-parent"]
    command += [word for folder in start.search_dirs for word in ("--search-dir", str(folder))]
    command += [word for file in start.files for word in ("-c", file)]
    command += ["--model", policy.alias or policy.base_model, "--model-url", policy.api, "head_server.port=0"]
    command += ["--", *start.overrides] if start.overrides else []
    key = {KEY_VARIABLE: policy.key or api_key()}
    async with own_process(command, READY, log, "the gym of this run", note, PolicyError, key) as head:
        yield head


async def _reached(entry: GymEntry, client: HttpClient, head: str) -> ServerDirectory:
    try:
        gym = await ServerDirectory.of_head(client, head)
        if entry.agent is not None:
            gym.agent(entry.agent)
    except (NoGym, UnknownAgent) as error:
        raise RolloutSourceError(str(error)) from error
    return gym
