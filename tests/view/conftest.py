from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest
from anyio.from_thread import start_blocking_portal
from fastapi import FastAPI
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from palestra.types.gym import GYM_HEAD
from palestra.view.access import Access
from palestra.view.app import create_app
from palestra.view.runs.catalogue import Catalogue
from palestra.view.tasks.task_plays import TaskPlays
from tests.view.folders import write_run

EVERYBODY_HERE = Access()


class OpenClient(Protocol):
    def __call__(self, root: Path, access: Access = ..., gym: str = ..., **options: Any) -> TestClient: ...


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs, to be copied from."""
    root = tmp_path_factory.mktemp("written")
    for name in ("first", "second"):
        write_run(root, name)
    return root


@pytest.fixture
def root(tmp_path: Path, written: Path) -> Path:
    """A folder with one run."""
    shutil.copytree(written / "first", tmp_path / "runs" / "first")
    return tmp_path / "runs"


@pytest.fixture
def second(root: Path, written: Path) -> Path:
    """A newer run beside the first."""
    return shutil.copytree(written / "second", root / "second")


@cache
def shared_app(access: Access) -> FastAPI:
    """An application for all clients with these rules: to resolve its routes and to compile its templates takes a
    tenth of a second."""
    return create_app(Catalogue(Path()), access)


@pytest.fixture(scope="module")
def open_client() -> Iterator[OpenClient]:
    """`open_client(root)`: a client of a dashboard of this folder. All clients of a module share an event loop."""
    with start_blocking_portal() as portal:

        def open_one(root: Path, access: Access = EVERYBODY_HERE, gym: str = GYM_HEAD, **options: Any) -> TestClient:
            app, catalogue, plays = shared_app(access), Catalogue(root), TaskPlays()

            async def own_state(scope: Scope, receive: Receive, send: Send) -> None:
                app.state.catalogue, app.state.plays, app.state.gym = catalogue, plays, gym
                await app(scope, receive, send)

            client = TestClient(own_state, **{"base_url": "http://localhost", **options})
            client.portal = portal
            return client

        yield open_one


@pytest.fixture
def client(root: Path, open_client: OpenClient) -> TestClient:
    return open_client(root, base_url="http://localhost:8400")
