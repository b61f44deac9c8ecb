"""Runs whose environments show pictures: what was sampled is what is trained, and records keep the files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from palestra.rollouts.sources import RolloutSourceError
from palestra.runs.pictures import read_picture
from palestra.runs.reader import Part, RunStatus
from tests.pictures import drawn, file_of
from tests.training import shown
from tests.training.trainers import FEW

ROWS = 12
"""Positions of a picture of 64 x 48 pixels; one of 32 x 32 has 4."""
SEEING = {
    "environments": [{"name": shown.NAME}],
    "rollout": {**FEW, "max_tokens": 6, "max_context": 200},
    "eval": {"every": 2, "tasks": 2},
    "steps": 2,
}


@pytest.fixture(scope="module")
def seeing(random_model, tmp_path_factory) -> Path:
    """A random model that ends its turns soon: a part of all tokens end one."""
    folder = tmp_path_factory.mktemp("seeing") / "model"
    shutil.copytree(random_model("qwen3_vl"), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(150, 400))}))
    return folder


def test_a_run_learns_from_rollouts_with_pictures(run_training, seeing):
    run = run_training("sees", server=None, model={"name": str(seeing)}, **SEEING)
    assert run.status() is RunStatus.DONE
    steps = [row for row in run.read_metrics() if "mismatch/logprob_abs_max" in row]
    assert [row["rollouts/failed"] for row in steps] == [0.0, 0.0]
    assert max(row["mismatch/logprob_abs_max"] for row in steps) < 2e-4
    record = next(one for one in run.read_rollouts(1, Part.ROLLOUTS) if one["turns"] == 2)
    first, _, second, _, _ = record["messages"]
    (_, part, _), (other,) = first["content"], second["content"]
    number = int(record["task"])
    assert read_picture(run.path, digest_of(part)) == file_of(drawn(number))
    assert read_picture(run.path, digest_of(other)) == file_of(drawn(1000 + number, 32, 32), "JPEG")
    row = next(one for one in run.read_rollouts(1, Part.TOKENS) if one["id"] == record["id"])
    assert [(rows, digest) for _, rows, digest in row["pictures"]] == [(ROWS, digest_of(part)), (4, digest_of(other))]


def digest_of(part):
    return part["image_url"]["url"].removeprefix("picture:")


def test_a_model_that_reads_text_only_ends_the_run_at_the_first_picture(run_training):
    with pytest.raises(RolloutSourceError, match=r"shown:ShownEnv: a message has a picture, but this model reads text"):
        run_training("blind", **SEEING)
