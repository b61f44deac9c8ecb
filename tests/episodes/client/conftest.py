"""The bundled model's server with keys, and a run of each test's own in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from palestra.episodes import EpisodeClient, Run
from palestra.types.episodes import NewGroup, RunSettings
from palestra.types.rollouts import Task
from tests.server.model_api.conftest import _make, make_ephebe

__all__ = ["make_ephebe"]

QUICK = RunSettings(backoff_s=0.0)
"""What is lost can be claimed again at once."""


def group(name: str, size: int = 1, **given: Any) -> NewGroup:
    task = Task(id="t1", environment="stockroom", prompt=[{"role": "user", "content": "How many cups are there?"}])
    return NewGroup(**{"group_id": name, "task": task, "size": size} | given)


@dataclass(frozen=True)
class Arena:
    """A server, and keys of one owner for it."""

    url: str
    trainer: str
    worker: str


@pytest.fixture(scope="session")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with _make(tmp_path_factory.mktemp("arena"), require_key="always") as server:
        server.start()
        keys = {right: server.make_key(right, owner="team", right=right) for right in ("trainer", "worker")}
        yield Arena(server.url, **keys)


@pytest.fixture
def client(arena: Arena) -> Iterator[EpisodeClient]:
    with EpisodeClient(arena.url, arena.trainer) as client:
        yield client


@pytest.fixture
def make_run(client: EpisodeClient, request: pytest.FixtureRequest) -> Callable[..., Run]:
    """`make_run(2, size=4)`: two groups of four."""

    def make(count: int = 1, settings: RunSettings = QUICK, **given: Any) -> Run:
        name = request.node.name.replace("[", "-").replace("]", "")[:100]
        run = client.run(name, settings, model="ephebe")
        run.register([group(f"g{i}", **given) for i in range(count)])
        return run

    return make
