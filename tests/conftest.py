"""What every test may use: random models made once per test process, no network, fair use of the cores."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported anywhere: parallel test processes with all cores each only get in each other's way.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the GPU's kernels are tested on the CPU

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

RandomModel = Callable[..., Path]


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """`random_model(family=..., **options)` as `make_random_model`, made at the first call. Do not write into it."""
    from palestra.model.loading.random_model import make_random_model

    made: dict[str, Path] = {}

    def get(family: str = "qwen3", **options: Any) -> Path:
        key = json.dumps({"family": family, **options}, sort_keys=True)
        if key not in made:
            made[key] = make_random_model(tmp_path_factory.mktemp(family), family=family, **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def micro_model(random_model: RandomModel) -> Path:
    return random_model()


settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")
