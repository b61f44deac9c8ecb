"""Exported tasks: their verifiers say what ours say, in a process that has nothing of ours, and in the SDK itself."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from palestra.environments.fleet import FleetTaskEnv, export_tasks, fleet_row, verifier_source
from palestra.environments.fleet.platform_tasks import PlatformTasks
from palestra.environments.platform import APPS, Instance, PlatformTask, make_task, verify
from palestra.environments.platform.attackers import stray_write
from palestra.environments.platform.golden import play_golden
from palestra.environments.platform.verifiers import VerifierExecution, run_verifier
from tests.environments.fleet.conftest import PUT, call, put_call

PYTHON = Path(os.environ.get("PALESTRA_FLEET_PYTHON") or Path(__file__).parents[3] / ".venv-fleet" / "bin" / "python")
EVERY_DAY = {("keys", "put_and_drop"), ("keys", "largest")}
"""One that changes rows, and one that asks for an answer."""
TEMPLATES = [
    pytest.param(
        f"{app.key}-{template.name}-{template.difficulty}",
        marks=() if (app.key, template.name) in EVERY_DAY else pytest.mark.slow,
        id=f"{app.key}-{template.name}",
    )
    for app in APPS.values()
    for template in app.templates
]


def endings(task: PlatformTask) -> list[tuple[Instance, str | None]]:
    """Solved, left alone, solved with one thing more, answered wrongly."""
    solved, idle, stray = (Instance(task.seed) for _ in range(3))
    answer = play_golden(task, solved).answer
    play_golden(task, stray)
    stray_write(task, stray)
    return [(solved, answer), (idle, None), (stray, answer), (solved, "zz 0")]


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_exported_verifier_says_what_ours_says(template: str):
    task = make_task(f"{template}-{2**31 + 1}")
    source, ends = verifier_source(task), endings(task)

    async def ran() -> list[VerifierExecution]:
        seed = task.seed.data
        return await asyncio.gather(*(run_verifier(source, seed, one.snapshot(), answer) for one, answer in ends))

    found = asyncio.run(ran())
    assert [one.error for one in found] == [""] * 4
    assert [one.score for one in found] == [verify(task, instance, answer).score for instance, answer in ends]
    assert [one.score for one in found][:3] == [1.0, 0.0, 0.0]


def test_the_file_is_one_of_fleets_and_plays_here(tmp_path: Path):
    file = tmp_path / "tasks.json"
    keys = PlatformTasks.parse("platform:keys?count=12").keys("train")
    assert export_tasks(keys, file) == 12
    rows = json.loads(file.read_text())
    shipped = {"key", "prompt", "env_id", "version", "data_id", "data_version", "verifier_func", "task_modality"}
    assert all(shipped <= row.keys() for row in rows)
    row = next(row for row in rows if "put_number" in row["key"])
    env = FleetTaskEnv({"tasks_file": str(file)}, {"task_key": row["key"]})
    env.init([])
    assert env.step(put_call(row["key"]) + "<done>")["reward"] == 1.0
    env.close()


def test_a_verifier_of_ones_own_is_the_one_that_counts(tmp_path: Path):
    """Also for a key of ours: what the file says is not overruled."""
    own = "def v(env, final_answer=None):\n    return env.db('current').table('numbers').eq('value', 7).count() / 2"
    rows = [
        {**fleet_row(make_task(PUT)), "verifier_func": own},
        {"key": "mine", "prompt": "Put 7.", "env_id": "keys", "data_id": "tiny-3", "verifier_func": own},
        {"key": "broken", "prompt": "Put 7.", "env_id": "keys", "verifier_func": "def v(env):\n    1 / 0"},
        {"key": "asserts", "prompt": "Put 7.", "env_id": "keys", "verifier_func": "def v(env):\n    assert not env"},
        {"key": "silent", "prompt": "Put 7.", "env_id": "keys", "verifier_func": "def v(env):\n    pass"},
        {"key": "none", "prompt": "Put 7.", "env_id": "keys"},
    ]
    (tmp_path / "tasks.json").write_text(json.dumps(rows))
    rewards: list[float | None] = []
    for row in rows:
        env = FleetTaskEnv({"tasks_file": str(tmp_path / "tasks.json")}, {"task_key": row["key"]})
        env.init([])
        rewards.append(env.step(call("put", value=7) + "<done>")["reward"])
        assert env.get_metrics()["unknown_reward"] == float(rewards[-1] is None)
        env.close()
    assert rewards == [0.5, 0.5, None, 0.0, None, None]


LOCAL = """
import json, sys
from fleet import Fleet
for one in json.load(open(sys.argv[1])):
    found = Fleet.execute_verifier_local(one["source"], one["seed"], one["current"], one["answer"])
    print(json.dumps(found["result"] if found["success"] else found["error"]))
"""


@pytest.mark.e2e
@pytest.mark.skipif(not PYTHON.exists(), reason="needs a venv with fleet-python: make clients")
def test_the_sdks_own_executor_agrees(tmp_path: Path):
    request: list[dict[str, str | None]] = []
    ours: list[float | None] = []
    for template in TEMPLATES:
        task = make_task(f"{template.values[0]}-5")
        seed = tmp_path / f"{task.key}.seed"
        seed.write_bytes(task.seed.data)
        for place, (instance, answer) in enumerate(endings(task)):
            current = tmp_path / f"{task.key}.{place}"
            current.write_bytes(instance.snapshot())
            one = {"source": verifier_source(task), "seed": str(seed), "current": str(current), "answer": answer}
            request.append(one)
            ours.append(verify(task, instance, answer).score)
    (tmp_path / "asked.json").write_text(json.dumps(request))
    response = [PYTHON, "-c", LOCAL, tmp_path / "asked.json"]
    ran = subprocess.run(response, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert [json.loads(line) for line in ran.stdout.splitlines()] == ours
