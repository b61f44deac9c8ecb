"""OpenEnv's own clients and its validator, unmodified, in a venv of their own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from palestra.environments.platform import APPS, Instance, make_task
from palestra.environments.platform.golden import play_golden
from tests.environments.platform.api.conftest import Platform
from tests.environments.platform.api.test_openenv import TASK, alive
from tests.waiting import until

ROOT = Path(__file__).parents[4]
PYTHON = Path(os.environ.get("PALESTRA_OPENENV_PYTHON") or ROOT / ".venv-openenv" / "bin" / "python")
WALK = Path(__file__).with_name("openenv_walk.py")
MANY = 20

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs a venv with openenv: make clients"),
]


def ran(*command: str | Path) -> str:
    done = subprocess.run([*command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_clients_play(platform: Platform):
    before, task = alive(platform), make_task(TASK)
    played = play_golden(task, Instance(task.seed)).steps
    calls = [[call.tool, call.arguments] for call, _ in played]
    url = f"{platform.url}/openenv/keys"
    response = json.loads(ran(PYTHON, WALK, url, TASK, json.dumps(calls)).splitlines()[-1])
    same = {
        "prompt": task.prompt,
        "tools": [tool.name for tool in APPS["keys"].tools],
        "results": [json.loads(result.text) for _, result in played],
        "end": [1.0, True],
    }
    generic = {"steps": len(calls), "after": True, "unknown": True, "again": "eval"}
    tools = {"steps": len(calls) + 1, "same": True, "wrong": "tool_not_found"}
    assert response == {"generic": same | generic, "tools": same | tools, "many": MANY}
    until(lambda: alive(platform) == before)


@pytest.mark.parametrize("app", ["keys", "mail"])
def test_the_validator_finds_nothing(platform: Platform, app: str):
    response = ran(PYTHON.with_name("openenv"), "validate", "--json", "--url", f"{platform.url}/openenv/{app}")
    report = json.loads(response)
    assert report["passed"]
    assert len(report["criteria"]) >= 6
    assert all(criterion["passed"] for criterion in report["criteria"])
