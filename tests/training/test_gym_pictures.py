"""A step over the servers of a gym whose row shows a picture: the agent, the endpoint and the trainer see the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palestra.environments.bundled.arithmetic import gym_rows
from palestra.runs.pictures import read_picture
from palestra.runs.reader import Part, RunStatus
from tests.pictures import data_url, drawn, file_of
from tests.server.conftest import Server
from tests.training.test_gym import GYM

pytestmark = pytest.mark.slow

ROWS = 12
"""Positions of a picture of 64 x 48 pixels."""


@pytest.fixture(scope="module")
def seeing(random_model, tmp_path_factory) -> Path:
    """A random model that ends its turns soon: a part of all tokens end one."""
    folder = tmp_path_factory.mktemp("seeing") / "model"
    shutil.copytree(random_model("qwen3_vl", context=2048), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(150, 400))}))
    return folder


@pytest.fixture(scope="module")
def server(seeing, tmp_path_factory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server"), seeing) as started:
        yield started.start()


def shown_rows(folder: Path) -> Path:
    """Sums, each with a picture before its words."""
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(gym_rows("eval")[:2]):
        asked = row["responses_create_params"]["input"][-1]
        picture = {"type": "input_image", "image_url": data_url(file_of(drawn(number)))}
        content = [picture, {"type": "input_text", "text": str(asked["content"])[:40]}]
        given = {"input": [{"role": "user", "content": content}]}
        rows.append({**row, "responses_create_params": given})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_row_of_a_gym_with_a_picture_is_played_and_trained(run_training, server, seeing, tmp_path: Path) -> None:
    run = run_training(
        "shown",
        server=server.url,
        model={"name": server.name, "tokenizer": str(seeing)},
        environments=[{"name": "gym", "tasks": str(shown_rows(tmp_path)), "config": GYM}],
        rollout={"group_size": 2, "groups_per_step": 2, "max_tokens": 16, "endings": {"length": "grade"}},
        data={"zero_variance": "keep"},
        eval={"every": 0},
        alias="shown",
        steps=1,
    )
    assert run.status() is RunStatus.DONE
    (metrics,) = run.read_metrics()
    assert (metrics["rollouts/failed"], metrics["env/gym/rollouts"]) == (0, 4)
    assert metrics["mismatch/logprob_abs_max"] < 2e-4
    files = {file_of(drawn(number)) for number in range(2)}
    for row in run.read_rollouts(1, Part.TOKENS):
        ((_, rows, digest),) = row["pictures"]
        assert rows == ROWS
        assert read_picture(run.path, digest) in files
