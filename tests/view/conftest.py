from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from palestra.view.app import create_app
from palestra.view.runs.catalogue import Catalogue
from tests.view.folders import write_run


@pytest.fixture
def root(tmp_path) -> Path:
    """A folder with one run."""
    write_run(tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def client(root) -> TestClient:
    return TestClient(create_app(Catalogue(root)), base_url="http://localhost:8400")
