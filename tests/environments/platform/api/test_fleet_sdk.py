"""Fleet's SDK, unmodified, against our server: only FLEET_BASE_URL is changed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from palestra.environments.platform import APPS, Instance, make_task
from palestra.environments.platform.api.auth import PlatformAuth
from palestra.environments.platform.golden import play_golden
from palestra.environments.platform.pool import InstancePool
from palestra.environments.platform.pool_records import PoolLimits
from tests.environments.platform.api.conftest import started

PYTHON = Path(os.environ.get("PALESTRA_FLEET_PYTHON") or Path(__file__).parents[4] / ".venv-fleet" / "bin" / "python")
WALK = Path(__file__).with_name("fleet_walk.py")
TASK = "keys-put_number-0b-17"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs a venv with fleet-python: make clients"),
]


def test_the_sdk_walks_through_a_task(tmp_path: Path):
    task = make_task(TASK)
    played = play_golden(task, Instance(task.seed))
    calls = json.dumps([[call.tool, call.arguments] for call, _ in played.steps])
    with InstancePool(PoolLimits(max_per_team=8)) as pool:
        for url in started(pool, PlatformAuth(secret=b"of the tests")):
            environment = {
                "FLEET_BASE_URL": url,
                "FLEET_API_KEY": "sk_any",
                "HOME": str(tmp_path),
                "PATH": os.environ["PATH"],
            }
            ran = subprocess.run(
                [PYTHON, WALK, TASK, calls], env=environment, capture_output=True, text=True, timeout=120, check=False
            )
            assert ran.returncode == 0, ran.stderr
        assert pool.usage().instances == 0
    value = task.params["value"]
    response = json.loads(ran.stdout.splitlines()[-1])
    assert response == {
        "envs": list(APPS),
        "regions": ["local"],
        "environment": "v1",
        "task": [TASK, "keys", task.seed.key, True],
        "running": 1,
        "status": ["running", task.seed.key, "walk"],
        "tools": len(APPS["keys"].tools),
        "none": 0.0,
        "done": 1.0,
        "again": True,
        "tables": ["items", "numbers"],
        "numbers": [[value]],
        "items": True,
        "changed": {"numbers": 1},
        "resources": ["sqlite://current", "sqlite://seed"],
        "defects": ["AttributeError", "RuntimeError"],  # of fleet-python itself: no answer of a server is looked at
        "tools_without_a_loop": len(APPS["keys"].tools),
        "heartbeat": True,
        "reset": True,
        "after_reset": [],
        "own": [True, 1, True, 0.0],
        "raw": 0,
        "instances": True,
        "runs": ["walk"],
        "closed": ["stopped", "stopped", "stopped"],
        "after_close": [True] * 7,
        "longest": True,
        "close_all": 1,
        "left": 0,
        "refused": [True, True, True, True],
        "without_waiting": True,
        "lists": [sum(len(app.templates) for app in APPS.values()), 10 * len(APPS["keys"].templates)],
        "async": 0.0,
    }
