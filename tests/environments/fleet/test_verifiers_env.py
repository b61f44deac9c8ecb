"""The environment for verifiers, evaluated by the real one in a venv of its own; the model is a script that it asks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from palestra.environments.fleet import fleet_row
from palestra.environments.fleet.platform_tasks import PlatformTasks
from palestra.environments.platform import make_task
from tests.environments.fleet.conftest import PUT
from tests.environments.fleet.scripted import DONE, next_word
from tests.scripted_endpoint import Policy, scripted_endpoint

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("PALESTRA_VERIFIERS_PYTHON") or ROOT / ".venv-verifiers" / "bin" / "python")
TASKS = "platform:mail?difficulty=0,1&count=6"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs a venv with verifiers and msgspec: make clients"),
]


def evaluated(folder: Path, policy: Policy, tasks_file: str, *more: str) -> list[dict[str, Any]]:
    variables = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'integrations' / 'palestra_fleet'}",
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "ANY_KEY": "x",
        "OMP_NUM_THREADS": "1",
    }
    with scripted_endpoint(policy) as url:
        command = [PYTHON.with_name("vf-eval"), "palestra-fleet", "-m", "scripted", "--rich", "None"]
        client = ["--client.base-url", url, "--client.api-key-var", "ANY_KEY"]
        chosen = ["--env.taskset.tasks-file", tasks_file, *more]
        done = subprocess.run(
            [*command, *client, *chosen],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("outputs/*/traces.jsonl")
    return [json.loads(line) for line in found.read_text().splitlines()]


def gold(messages: list[dict[str, str]]) -> str:
    by_prompt = {task.prompt: task for task in map(make_task, PlatformTasks.parse(TASKS).keys("eval"))}
    assert messages[0]["role"] == "system"
    assert "search_messages" in messages[0]["content"]
    response = [message["content"] for message in messages[2:] if message["role"] == "user"]
    return next_word(by_prompt[messages[1]["content"]], response)


@pytest.mark.parametrize(("policy", "reward"), [(gold, 1.0), (lambda _: DONE, 0.0)], ids=["gold", "nothing"])
def test_the_solution_is_worth_1_and_nothing_0(tmp_path: Path, policy: Policy, reward: float):
    episodes = evaluated(tmp_path, policy, TASKS)
    expected = {str(key) for key in PlatformTasks.parse(TASKS).keys("eval")}
    assert {one["task"]["key"] for one in episodes} == expected
    assert all(one["ok"] for one in episodes)
    rewards = [one["traces"][0]["rewards"] for one in episodes]
    assert rewards == [{"verifier": {"score": reward, "weight": 1.0}}] * 6
    assert all(one["traces"][0]["metrics"]["turns"] >= 1 for one in episodes)


def test_a_run_that_verifiers_ends_is_graded_as_it_stands(tmp_path: Path):
    def busy(messages: list[dict[str, str]]) -> str:
        word = gold(messages)
        return "I am still thinking." if word == DONE else word

    one_call = TASKS.replace("difficulty=0,1&count=6", "template=mark_read&count=1")
    (episode,) = evaluated(tmp_path, busy, one_call, "--env.player.max-turns", "2")
    assert episode["traces"][0]["stop_condition"] == "max_turns"
    assert episode["traces"][0]["rewards"]["verifier"]["score"] == 1.0


def test_a_grade_that_nobody_knows_is_a_failed_episode(tmp_path: Path):
    broken = {**fleet_row(make_task(PUT)), "key": "broken", "verifier_func": "def v(env):\n    1 / 0"}
    (tmp_path / "tasks.json").write_text(json.dumps([broken]))
    (episode,) = evaluated(tmp_path, lambda _: DONE, "tasks.json", "--env.taskset.split", "train")
    assert not episode["ok"]
    assert "its verifier failed" in episode["errors"][0]["message"]
    assert "verifier" not in episode["traces"][0]["rewards"]
