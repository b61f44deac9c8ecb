"""A real server with the bundled model, and runs against it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from palestra.config.train import load_train_config
from palestra.runs.writer import RunFolder
from palestra.training.listener import RunListener, Silence
from tests.training.trainers import SMALL, merged

os.environ["TINKER_TELEMETRY"] = "0"

READY = "Palestra is ready at "


@pytest.fixture(scope="session")
def ephebe_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("ephebe")
    command = [
        sys.executable,
        "-m",
        "palestra.cli",
        "serve",
        "--port",
        "0",
        "--state",
        str(folder / "state"),
        "--device",
        "cpu",
    ]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--with-parent"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert READY in line, (folder / "server.log").read_text()
        yield line.partition(READY)[2].split()[0]
        process.terminate()


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
