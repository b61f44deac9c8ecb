"""An endpoint, and a gym of two agents in front of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FILES = [
    "resources_servers/guess_number/configs/guess_number.yaml",
    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
]
AGENT = "guess_number_gymnasium_agent"


@pytest.fixture(scope="session")
def upstream() -> Iterator[str]:
    command = [sys.executable, str(Path(__file__).parent / "upstream.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def nemo_rl_config(upstream: str) -> dict[str, Any]:
    return {
        "model_name": "policy",
        "base_urls": [upstream],
        "initial_global_config_dict": {"config_paths": FILES, "num_gpu_nodes": 1},
        "attempts": 1,
    }


def row(wish: str, index: int, **more: Any) -> dict[str, Any]:
    """A game of two turns, if nothing goes wrong."""
    given = {"input": [{"role": "system", "content": wish}]}
    return {
        "responses_create_params": given,
        "agent_ref": {"name": AGENT},
        "secret": 50,
        "guesses": 2,
        "_rowidx": index,
        **more,
    }
