"""The gyms of a run: those it starts, those that run already, and where their agents are.

Owns: starting them with the run's model as their policy, addresses. Never touches: rows, rollouts.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
from msgspec import Struct

from palestra.config.environment_entries import EnvironmentEntry, GymEntry, GymStart, gym_entry
from palestra.training.aliases import api_key
from palestra.training.own_process import own_process
from palestra.training.rollouts.collecting import TrainingError
from palestra.types.gym import is_gym
from palestra.util.suggest import did_you_mean

READY = "The gym is ready at "
KEY_VARIABLE = "PALESTRA_POLICY_KEY"
AGENTS = "responses_api_agents"
HEAD_S = 10.0


class PolicyAddress(Struct, frozen=True):
    """What a gym's model server asks."""

    url: str
    """Of the run's server."""
    alias: str | None
    """It follows the run's weights: for agents that do not hand on what a row says about them."""
    base_model: str

    @property
    def api(self) -> str:
        return f"{self.url.rstrip('/')}/v1"


class Gym:
    """One that runs, by its head. Its servers may move: `refresh` asks again."""

    def __init__(self, http: httpx.AsyncClient, head: str) -> None:
        self._http = http
        self.head = head.rstrip("/")
        self._agents: dict[str, str] = {}

    async def refresh(self) -> None:
        """Raises httpx.HTTPError, ValueError."""
        answer = await self._http.get(f"{self.head}/server_instances", timeout=HEAD_S)
        found = answer.raise_for_status().json()
        if not isinstance(found, list):
            raise ValueError(f"what answers at {self.head} is not the head of a gym")
        self._agents = {
            one["config_path"]: one.get("url") or f"http://{one['host']}:{one['port']}"
            for one in found
            if one.get("server_type") == AGENTS
        }

    def agent(self, name: str) -> str:
        """Its address. Raises LookupError, with the nearest name."""
        if name in self._agents:
            return self._agents[name]
        hint = did_you_mean(name, sorted(self._agents))
        raise LookupError(f"the gym at {self.head} has no agent {name!r}; {hint}")


@asynccontextmanager
async def open_gyms(
    entries: Iterable[EnvironmentEntry],
    policy: PolicyAddress,
    logs: Path,
    http: httpx.AsyncClient,
    note: Callable[[str], None],
) -> AsyncIterator[dict[str, Gym]]:
    """By the entry's name. Raises PolicyError where one cannot be started, TrainingError where none answers."""
    started: dict[GymStart, str] = {}
    gyms: dict[str, Gym] = {}
    async with AsyncExitStack() as stack:
        for entry in entries:
            if not is_gym(entry.name):
                continue
            known = gym_entry(entry)
            if known.head is None and known.start not in started:
                log = logs / f"gym-{len(started)}.log"
                started[known.start] = await stack.enter_async_context(own_gym(known.start, policy, log, note))
            gyms[entry.name] = await _reached(known, Gym(http, known.head or started[known.start]))
        yield gyms


@asynccontextmanager
async def own_gym(start: GymStart, policy: PolicyAddress, log: Path, note: Callable[[str], None]) -> AsyncIterator[str]:
    """The address of its head."""
    command = [sys.executable, "-m", "palestra.cli", "gym", "run", "--with-parent"]
    command += [word for folder in start.search_dirs for word in ("--search-dir", str(folder))]
    command += [word for file in start.files for word in ("-c", file)]
    command += ["--model", policy.alias or policy.base_model, "--model-url", policy.api, "head_server.port=0"]
    command += ["--", *start.overrides] if start.overrides else []
    async with own_process(command, READY, log, "the gym of this run", note, {KEY_VARIABLE: api_key()}) as head:
        yield head


async def _reached(entry: GymEntry, gym: Gym) -> Gym:
    try:
        await gym.refresh()
        if entry.agent is not None:
            gym.agent(entry.agent)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        said = str(error) or type(error).__name__
        raise TrainingError(f"no gym answers at {gym.head} ({said}); to start one: palestra gym run -c FILE") from error
    except LookupError as error:
        raise TrainingError(str(error.args[0])) from None
    return gym
