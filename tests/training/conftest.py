"""A real server with the bundled model, and runs against it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from palestra.config.train import load_train_config
from palestra.runs.listener import RunListener, Silence
from palestra.runs.writer import RunFolder
from tests.server.model_api.conftest import Ephebe
from tests.training.trainers import SMALL, merged

os.environ["TINKER_TELEMETRY"] = "0"


@pytest.fixture(scope="session")
def ephebe_url(shared_ephebe: Callable[..., Ephebe]) -> str:
    return shared_ephebe().url


@pytest.fixture
def run_training(ephebe_url: str, tmp_path: Path) -> Callable[..., RunFolder]:
    """`run_training("name", key={"sub": 1})`: a whole run, to its end; the folder to read it from."""

    def run(name: str, listener: RunListener | None = None, **settings: Any) -> RunFolder:
        from palestra.training.launch import train

        saved = merged(SMALL, {"server": ephebe_url, "runs": str(tmp_path / "runs"), "name": name, **settings})
        config = load_train_config([], [], saved)
        with RunFolder.create(config.runs, name, config) as folder:
            asyncio.run(train(config, folder, listener or Silence()))
        return folder

    return run
