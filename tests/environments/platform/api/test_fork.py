"""An exported tasks file at the platform, through the calls of Fleet's own `FleetTaskEnv`, in its order.

Its wrapper fills in `task_key`, `env_key` and `env_version` where a row lacks them. The layer below reads those names
and `data_key`: a row without that name is played in another world and cannot be graded.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from palestra.environments.fleet import export_tasks
from palestra.environments.platform import APPS, Instance, make_task
from palestra.environments.platform.api.auth import PlatformAuth
from palestra.environments.platform.golden import GoldTrajectory, play_golden
from palestra.environments.platform.pool import InstancePool
from tests.environments.platform.api.conftest import KEY, Platform, started
from tests.environments.platform.api.test_runner import arguments, bundle

PYTHON = Path(os.environ.get("PALESTRA_FLEET_PYTHON") or Path(__file__).parents[4] / ".venv-fleet" / "bin" / "python")
WALK = Path(__file__).with_name("fork_walk.py")
PATHS = ("mcp", "api/v1/mcp")


def exported(folder: Path, *apps: str) -> Path:
    """One task of each app, in another world than the one that is there where no data is named."""
    file = folder / "tasks.json"
    templates = [(app, APPS[app].templates[-1]) for app in apps]
    keys = [f"{app}-{template.name}-{template.difficulty}-2" for app, template in templates]
    assert "small-0" not in {make_task(key).seed.key for key in keys}
    export_tasks(keys, file)
    return file


def solution(task_key: str) -> GoldTrajectory:
    task = make_task(task_key)
    return play_golden(task, Instance(task.seed, variables=task.variables))


def read_as_the_fork_does(row: dict[str, Any]) -> dict[str, Any]:
    filled = (("task_key", "key"), ("env_key", "env_id"), ("env_version", "version"))
    return {**{name: row[other] for name, other in filled if other in row}, **row}


def asked(platform: Platform, url: str, method: str, **params: Any) -> dict[str, Any]:
    """Each operation is a connection of its own, which begins with a handshake."""
    for number, (one, given) in enumerate((("initialize", {"protocolVersion": "2025-11-25"}), (method, params))):
        message = {"jsonrpc": "2.0", "id": number, "method": one, "params": given}
        answer = platform.http.post(url, json=message)
        assert answer.status_code == 200, answer.text
    return answer.json()["result"]


@pytest.mark.parametrize("app", APPS)
def test_an_exported_task_is_graded_by_the_calls_of_fleets_own_environment(
    platform: Platform, tmp_path: Path, app: str
):
    (row,) = json.loads(exported(tmp_path, app).read_text())
    task = read_as_the_fork_does(row)
    made = platform.make(
        env_key=task["env_key"],
        env_version=task["env_version"],
        data_key=task.get("data_key"),
        data_version=task.get("data_version") if task.get("data_key") else None,
        env_variables=task.get("env_variables"),
        created_from="sdk",
        ttl_seconds=600,
        max_wait_seconds=870,
    )
    key = {"Authorization": f"Bearer {KEY}"}
    assert httpx.post(f"{made['urls']['manager']['api']}/reset", json={}, headers=key).json()["success"]
    urls = [made["urls"]["root"] + path for path in PATHS]
    listed = [[tool["name"] for tool in asked(platform, url, "tools/list")["tools"]] for url in urls]
    assert listed == [[tool.name for tool in APPS[app].tools]] * 2
    golden = solution(row["key"])
    for call, _ in golden.steps:
        response = asked(platform, urls[0], "tools/call", name=call.tool, arguments=call.arguments)
        assert not response["isError"], response
    code = task.get("verifier_code") or task["verifier_func"]
    assert platform.http.get("/v1/verifiers/check?sha256=unstable").json() == {"success": False}
    given = {} if golden.answer is None else {"final_answer": golden.answer}
    body = {
        "key": task["task_key"],
        "sha256": f"of {row['key']}",
        "args": arguments(**given),
        "args_array": [{"env": made["instance_id"]}],
        "function_name": code.partition("def ")[2].partition("(")[0],
        "timeout": 30,
        "region": "us-west-1",
        "bundle": bundle(code),
    }
    graded = platform.http.post("/v1/verifiers/execute", json=body).json()
    assert (graded["success"], graded["result"]) == (True, 1.0), graded
    assert platform.http.delete(f"/v1/env/instances/{made['instance_id']}").json()["status"] == "stopped"


@pytest.mark.e2e
@pytest.mark.skipif(not PYTHON.exists(), reason="needs a venv with fleet-python and mcp: make clients")
def test_the_sdk_grades_exported_tasks_of_every_app_as_fleets_own_environment_asks_it_to(tmp_path: Path):
    file = exported(tmp_path, *APPS)
    rows = json.loads(file.read_text())
    solutions = {
        row["key"]: {"calls": [[call.tool, call.arguments] for call, _ in found.steps], "answer": found.answer}
        for row in rows
        for found in [solution(row["key"])]
    }
    with InstancePool() as pool:
        for url in started(pool, PlatformAuth(secret=b"of the tests")):
            environment = {
                "FLEET_BASE_URL": url,
                "FLEET_API_KEY": KEY,
                "HOME": str(tmp_path),
                "PATH": os.environ["PATH"],
            }
            command = [PYTHON, WALK, file, json.dumps(solutions)]
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
            assert ran.returncode == 0, ran.stderr
    response = json.loads(ran.stdout.splitlines()[-1])
    assert response == {
        row["key"]: {"idle": 0.0, "solved": 1.0, "tools": len(APPS[row["env_id"]].tools)} for row in rows
    }
