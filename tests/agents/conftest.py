"""A server with a puppet that lets every agent do one thing, and a run whose episodes the agents play."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from palestra.episodes import EpisodeClient
from palestra.testing.puppet import Cue, make_puppet
from tests.agents.frameworks import FRAMEWORKS
from tests.agents.programs import PROGRAMS
from tests.server.conftest import KEY, Server

_numbers = itertools.count()
CONTEXT = 65536


class PuppetServer(Server):
    name, worker = "puppet", "worker-puppet"


@dataclass
class Stage:
    """One run of episodes."""

    server: PuppetServer
    run: str = field(default_factory=lambda: f"run-{next(_numbers)}")

    def register(self) -> EpisodeClient:
        """Registers one episode and returns a client to claim it with."""
        http = self.server.http()
        http.put(f"/episodes/v1/runs/{self.run}", json={"model": "puppet"}).raise_for_status()
        task = {"id": "1", "environment": "files", "prompt": []}
        group = {"group_id": "g", "size": 1, "task": task}
        http.post(f"/episodes/v1/runs/{self.run}/groups", json={"groups": [group]}).raise_for_status()
        return EpisodeClient(self.server.url, key=KEY)

    def played(self) -> dict[str, Any]:
        """The episode as its trainer gets it."""
        answer = self.server.http().get(f"/episodes/v1/runs/{self.run}/groups", params={"wait_s": 30})
        (group,) = answer.raise_for_status().json()["groups"]
        (episode,) = group["episodes"]
        return episode

    def traces(self, episode: dict[str, Any]) -> list[dict[str, Any]]:
        http, info = self.server.http(), episode["info"]
        found = http.get("/v1/traces", params={"origin": f"{info['episode_id']}#{info['attempt']}"}).json()["data"]
        return [http.get(f"/v1/traces/{one['id']}").json() for one in reversed(found)]

    def timeline(self, episode: dict[str, Any]) -> str:
        return self.server.http().get(f"/episodes/v1/episodes/{episode['info']['episode_id']}/timeline").text


@contextmanager
def serving(script: Sequence[Cue], folder: Path, context: int) -> Iterator[PuppetServer]:
    model = make_puppet(folder / "puppet", script, context=context)
    with PuppetServer(folder / "server", model, "log_level=debug") as server:
        server.start()
        yield server


@pytest.fixture(scope="session")
def puppet_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PuppetServer]:
    script = [cue for player in (*PROGRAMS, *FRAMEWORKS) for cue in player.script]
    with serving(script, tmp_path_factory.mktemp("agents"), CONTEXT) as server:
        yield server


@pytest.fixture(scope="session")
def coding_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PuppetServer]:
    """For the runs of `coding_run`, which have names of their own."""
    from tests.agents.coding_run import SCRIPT, needs_wall

    needs_wall()
    with serving(SCRIPT, tmp_path_factory.mktemp("coding"), 8192) as server:
        yield server


@pytest.fixture
def stage(puppet_server: PuppetServer) -> Stage:
    return Stage(puppet_server)
