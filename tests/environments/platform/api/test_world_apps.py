"""One app of a world through the runner: what Fleet's `env.app(name)` asks for, without the instance in the path."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from palestra.environments.platform import Instance, make_task
from palestra.environments.platform.golden import play_golden
from tests.environments.platform.api.conftest import KEY, Platform

TASK = "travel-stay_to_calendar-1-3"
FLEET = Path(os.environ.get("PALESTRA_FLEET_PYTHON") or Path(__file__).parents[4] / ".venv-fleet" / "bin" / "python")


def root_of(instance: dict[str, Any]) -> str:
    """As the SDK has it: scheme and all before the path."""
    found = urlsplit(instance["urls"]["manager"]["api"])
    return f"{found.scheme}://{found.netloc}"


def played(platform: Platform) -> dict[str, Any]:
    """A world in which the task is done."""
    task = make_task(TASK)
    made = platform.make(env_key="travel", data_key=task.seed.key)
    for call, _ in play_golden(task, Instance(task.seed)).steps:
        platform.call(made["instance_id"], call.tool, call.arguments)
    return made


def test_an_app_is_seen_alone_and_by_its_own_names(platform: Platform):
    made = played(platform)
    root = root_of(made)
    with httpx.Client() as http:
        mail = f"{root}/mail/api/v1/env"
        assert [one["mode"] for one in http.get(f"{mail}/resources").json()] == ["ro", "ro"]
        tables = {one["name"] for one in http.get(f"{mail}/resources/sqlite/seed/describe").json()["tables"]}
        assert {"messages", "events"} <= tables
        assert not any(name.startswith(("_", "mail_", "stay_")) for name in tables)
        request = {"query": "SELECT count(*) FROM events"}
        now, before = (
            http.post(f"{mail}/resources/sqlite/{name}/query", json=request).json()["rows"][0][0]
            for name in ("current", "seed")
        )
        assert now == before + 1
        changed = http.post(f"{mail}/diff/structured", json={}).json()["diff"]
        assert (changed["events"]["table_name"], len(changed["events"]["added_rows"])) == ("events", 1)
        assert "events" not in http.post(f"{mail}/diff/structured", json={"ignore_config": {"tables": ["events"]}}).text
        assert http.post(f"{root}/stay/api/v1/env/diff/structured", json={}).json()["diff"] == {}
        # The whole world is where it was, and the same login opens it.
        whole = http.post(f"{made['urls']['manager']['api']}/resources/sqlite/current/query", json=request)
        assert "no such table" in whole.json()["error"]
        request = {"query": "SELECT count(*) FROM mail_events"}
        whole = http.post(f"{made['urls']['manager']['api']}/resources/sqlite/current/query", json=request)
        assert whole.json()["rows"] == [[now]]


def test_what_cannot_be_asked_of_one_app(platform: Platform):
    root = root_of(platform.make(env_key="travel"))
    with httpx.Client() as http:
        write = {"query": "DELETE FROM messages", "read_only": False}
        answers = [
            http.get(f"{root}/forge/api/v1/env/resources"),
            http.post(f"{root}/mail/api/v1/env/resources/sqlite/current/query", json=write),
            http.post(f"{root}/mail/api/v1/env/reset", json={}),
            http.post(f"{root}/mail/api/v1/env/resources/sqlite/current/query", json={"query": 3}),
        ]
    assert [one.status_code for one in answers] == [400] * 4
    response = [one.json()["detail"] for one in answers]
    assert "there is mail, stay" in response[0]
    assert "write to the database of the whole world" in response[1]
    assert "send it to the instance" in response[2]


def test_only_the_instances_own_login_opens_it(platform: Platform):
    one, other = (platform.make(env_key="travel") for _ in range(2))
    path = "/mail/api/v1/env/resources"
    login, others = (urlsplit(made["urls"]["manager"]["api"]) for made in (one, other))
    assert platform.stranger.get(path).status_code == 403
    wrong = [(one["instance_id"], ""), (one["instance_id"], str(others.password)), ("x", str(login.password))]
    statuses = [platform.stranger.get(path, auth=pair).status_code for pair in wrong]
    assert statuses == [403, 403, 410]
    unreadable = {"Authorization": "Basic \xff\xfe".encode("latin-1")}
    assert platform.stranger.get(path, headers=unreadable).status_code == 403
    assert platform.stranger.get(path, auth=(str(login.username), str(login.password))).status_code == 200
    platform.http.delete(f"/v1/env/instances/{one['instance_id']}")
    assert platform.stranger.get(path, auth=(str(login.username), str(login.password))).status_code == 410


def test_addresses_for_agents_and_of_single_apps_have_no_login(platform: Platform):
    world, single = platform.make(env_key="travel")["urls"], platform.make()["urls"]
    assert all("@" not in url for url in (world["root"], world["app"][0], world["api"]))
    assert "@" not in json.dumps(single)
    shown = platform.http.get(f"/v1/env/instances/{world['root'].rstrip('/').rpartition('/')[2]}").json()
    assert shown["urls"] == world


@pytest.mark.e2e
@pytest.mark.skipif(not FLEET.exists(), reason="needs a venv with fleet-python: make clients")
def test_the_sdk_walks_through_the_apps_of_a_world(platform: Platform, tmp_path: Path):
    task = make_task(TASK)
    calls = json.dumps([[call.tool, call.arguments] for call, _ in play_golden(task, Instance(task.seed)).steps])
    environment = {
        "FLEET_BASE_URL": platform.url,
        "FLEET_API_KEY": KEY,
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
    }
    walk = Path(__file__).with_name("fleet_apps_walk.py")
    ran = subprocess.run(
        [FLEET, walk, TASK, calls], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    response = json.loads(ran.stdout.splitlines()[-1])
    assert response == {"events": 1, "stay": True, "async": 1, "diff": True, "own": 1.0, "done": 1.0}
