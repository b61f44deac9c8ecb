"""The examples do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from palestra.types.rollouts import Task
from palestra.util.programs import missing

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_python_one_makes_sums_and_plays_them(arena, client):
    command = [sys.executable, EXAMPLES / "play_episodes.py", "--server", arena.url, "--key", arena.trainer]
    command += ["--run", "by-python", "--register", "2", "--wait", "0"]
    played = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert played.returncode == 0, played.stderr
    assert played.stdout.count("(accepted)") == 8
    groups = list(client.run("by-python").groups(wait_s=0))
    assert [len(one.episodes) for one in groups] == [4, 4]
    assert all(one.trajectories and one.info.calls for played in groups for one in played.episodes)


@pytest.mark.skipif(missing("curl", "jq") is not None, reason=str(missing("curl", "jq")))
def test_the_one_with_curl_plays_as_a_worker(arena, make_run):
    prompt = [{"role": "user", "content": "What is 1 + 1?"}]
    run = make_run(size=2, task=Task(id="one", environment="arithmetic", prompt=prompt, extras={"answer": 2}))
    played = subprocess.run(
        [EXAMPLES / "play_episodes.sh", arena.url, run.name, "2"],
        env=os.environ | {"PALESTRA_KEY": arena.worker},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert played.returncode == 0, played.stderr
    assert played.stdout.count("(accepted)") == 2
    (whole,) = run.groups(wait_s=0)
    assert {one.info.result.reward for one in whole.episodes if one.info.result} <= {0.0, 1.0}
    assert all(one.trajectories and one.info.result for one in whole.episodes)
