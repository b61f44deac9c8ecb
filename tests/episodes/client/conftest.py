"""The bundled model's server with keys, and a run of each test's own in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from palestra.episodes import EpisodeClient, Run
from palestra.types.episodes import NewGroup, RunSettings
from palestra.types.rollouts import Task
from tests.server.episodes.conftest import keyed
from tests.server.model_api.conftest import Ephebe, make_ephebe

__all__ = ["keyed", "make_ephebe"]

_numbers = itertools.count()

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
def arena(keyed: Ephebe) -> Arena:
    owner = f"team {next(_numbers)}"
    keys = {right: keyed.make_key(f"{owner}: {right}", owner=owner, right=right) for right in ("trainer", "worker")}
    return Arena(keyed.url, **keys)


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
