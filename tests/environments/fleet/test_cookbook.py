"""The adapter for tinker-cookbook, played and trained by the real one in a venv of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from palestra.environments.fleet import fleet_row
from palestra.environments.platform import make_task
from tests.environments.fleet.conftest import PUT

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("PALESTRA_COOKBOOK_PYTHON") or ROOT / ".venv-cookbook" / "bin" / "python")
HERE = Path(__file__).parent
MODEL = "Qwen/Qwen3-8B"
"""A name that the cookbook knows a renderer for; what is behind it is small and random."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
BROKEN = """def v(env):
    found = [row['value'] for row in env.db('current').table('numbers').all()]
    return float(found[0] == 1)"""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs a venv with tinker-cookbook and msgspec: make clients"),
]


def ran(folder: Path, *command: str | Path, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [*command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model, and its tokenizer where the cookbook finds it without a network."""
    here = tmp_path_factory.mktemp("cookbook")
    ran(here, sys.executable, "-m", "palestra.cli", "model", "random", "model", "--shape", "micro")
    (here / MODEL).mkdir(parents=True)
    for name in TOKENIZER:
        shutil.copy(here / "model" / name, here / MODEL)
    return here


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    broken = {**fleet_row(make_task(PUT)), "key": "broken", "verifier_func": BROKEN}
    (folder / "broken.json").write_text(json.dumps([broken]))
    tasks = "platform:keys?difficulty=0b,0d,2&count=8"
    return json.loads(ran(folder, PYTHON, HERE / "cookbook_walk.py", tasks, "broken.json").splitlines()[-1])


def test_the_solution_is_worth_1_and_nothing_0(seen: dict[str, Any]):
    assert seen["batches"] == [4, 1]
    assert [one["rewards"] for one in seen["gold"]] == [[1.0, 1.0]] * 2 + [[1.0]] * 2
    assert [one["rewards"] for one in seen["null"]] == [[0.0, 0.0]] * 2 + [[0.0]] * 2
    assert {stop for one in seen["null"] for stop in one["stops"]} == {"completed"}
    assert all(min(one["rows"]) > 0 for one in seen["gold"] + seen["null"])


def test_metrics_come_apart_by_app_and_level(seen: dict[str, Any]):
    for one in seen["gold"]:
        level = "-".join([one["key"].split("-")[0], one["key"].split("-")[2]])
        assert one["tags"] == ["fleet_task", "keys", level]


def test_what_is_cut_is_graded_as_it_stands(seen: dict[str, Any]):
    assert (seen["cut"]["rewards"], set(seen["cut"]["stops"])) == ([1.0, 1.0], {"max_tokens"})
    assert (seen["tight"]["rewards"], set(seen["tight"]["stops"])) == ([0.0, 0.0], {"max_tokens"})


def test_a_grade_that_nobody_knows_moves_no_mean(seen: dict[str, Any]):
    assert sorted(seen["unknown"]["rewards"]) == [0.0, 0.5, 1.0]


def test_no_instance_is_left(seen: dict[str, Any]):
    everything = [*seen["gold"], *seen["null"], seen["cut"], seen["tight"], seen["unknown"]]
    assert [one["live"] for one in everything] == [0] * len(everything)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    args = ["serve", "--model", "model", "--name", MODEL, "--port", "0", "--state", "state"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "palestra.cli", *args],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        assert server.stdout is not None
        said = next((line for line in server.stdout if "ready at" in line), "")
        found = re.search(r"http://\S+?:\d+", said)
        assert found is not None, (folder / "server.log").read_text()
        yield found[0]
    finally:
        server.terminate()
        server.wait(30)


def test_its_loop_trains_on_our_server(folder: Path):
    with serving(folder) as url:
        ran(folder, PYTHON, HERE / "cookbook_train.py", "log", TINKER_BASE_URL=url, TINKER_API_KEY="tml-any")
    steps = [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]
    played = [step for step in steps if "env/all/reward/total" in step]
    assert len(played) == 2
    assert all("env/keys/reward/total" in step for step in played)
    assert any("test/env/keys/reward/total" in step for step in steps)
