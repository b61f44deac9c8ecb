"""Worlds of several apps on every face: the same bytes, the same state, the same verdicts."""

from __future__ import annotations

import base64
import pickle
from datetime import date, timedelta
from typing import Any

import pytest

from palestra.environments.fleet import FleetTaskEnv
from palestra.environments.fleet.backend import partial_score
from palestra.environments.platform import APPS, Instance, PlatformTask, SolutionCall, make_task, verify
from palestra.environments.platform.api.wire import sha_of
from palestra.environments.platform.golden import play_golden
from palestra.environments.platform.pool import InstancePool
from palestra.environments.platform.pool_records import InstanceSpec, PoolLimits
from palestra.environments.platform.seeds import seed_named
from palestra.environments.platform.verifiers.source import verifier_source
from tests.environments.fleet.scripted import call as said
from tests.environments.platform.api.conftest import Platform
from tests.environments.platform.api.test_openenv import connected

KEYS = ["travel-cancel_and_tell-2-1", "team-close_and_tell-3-2", "team-file_post-3-2147483649.noise"]
TASK = KEYS[0]


def solution(task: PlatformTask) -> list[SolutionCall]:
    return [call for call, _ in play_golden(task, Instance(task.seed)).steps]


def verified(platform: Platform, task: PlatformTask, instance_id: str) -> dict[str, Any]:
    """As Fleet's SDK asks for it."""
    args = base64.b64encode(pickle.dumps({"args": (None,), "kwargs": {}})).decode()
    body = {"key": str(task.key), "sha256": sha_of(verifier_source(task)), "args": args}
    answer = platform.http.post("/v1/verifiers/execute", json={**body, "args_array": [{"env": instance_id}]})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("key", KEYS)
def test_a_world_is_the_same_on_every_face(platform: Platform, key: str):
    task = make_task(key)
    alone = Instance(task.seed)
    made = platform.make(env_key=task.app.key, data_key=task.seed.key, env_variables=dict(task.variables))
    instance_id = made["instance_id"]
    listed = platform.mcp(instance_id, "tools/list").json()["result"]["tools"]
    assert [tool["name"] for tool in listed] == [tool.name for tool in task.app.tools]
    response = platform.http.get(f"/v1/tasks/{key}").json()
    assert (response["environment_id"], response["prompt"]) == (task.app.key, task.prompt)
    env = FleetTaskEnv({"tasks_file": "platform:"}, {"task_key": key})
    env.init([])
    with connected(platform, f"{task.app.key}/ws") as player:
        assert player.reset(task_key=key)["observation"]["variables"] == dict(task.variables)
        for one in solution(task):
            expected = alone.call(one.tool, one.arguments)
            assert platform.call(instance_id, one.tool, one.arguments)["content"][0]["text"] == expected.text
            raw = player.said({"type": "step", "data": {"tool_name": one.tool, "arguments": one.arguments}})
            assert f'"result":{expected.text}' in raw
            step = env.step(said(one.tool, **one.arguments))
            assert step["metadata"]["error"] is None
        assert player.finish()["reward"] == 1.0
    assert env.step("<done>")["reward"] == 1.0
    env.close()
    with platform.pool.use(instance_id) as instance:
        assert instance.state_hash() == alone.state_hash()
    diff = platform.runner(instance_id, "diff/structured", {}).json()["diff"]
    assert {name.partition("_")[0] for name in diff} == verify(task, alone).apps.keys()
    assert verified(platform, task, instance_id)["result"] == 1.0


def test_apps_are_told_one_by_one_and_make_a_partial_reward(platform: Platform):
    task = make_task(TASK)
    instance_id = platform.make(env_key="travel", data_key=task.seed.key)["instance_id"]
    env = FleetTaskEnv({"tasks_file": "platform:", "partial_reward": True}, {"task_key": TASK})
    env.init([])
    idle = verified(platform, task, instance_id)
    assert "App mail: 0\nApp stay: 0\n" in idle["stdout"]
    assert (idle["result"], partial_score(idle["stdout"])) == (0.0, 0.0)
    for one in solution(task):
        if one.tool.startswith("stay."):
            platform.call(instance_id, one.tool, one.arguments)
            env.step(said(one.tool, **one.arguments))
    half = verified(platform, task, instance_id)
    assert "App mail: 0\nApp stay: 1\n" in half["stdout"]
    assert (half["result"], partial_score(half["stdout"])) == (0.0, 0.5)
    assert env.step("<done>")["reward"] == 0.5
    env.close()
    source = {"function_code": verifier_source(task), "function_name": None}
    exported = platform.runner(instance_id, "execute_verifier_function", source).json()
    assert (exported["success"], exported["result"]) == (True, 0.0)


def test_what_the_platform_keeps_of_an_app_is_not_seen(platform: Platform):
    instance_id = platform.make(env_key="travel")["instance_id"]
    today = date.fromisoformat(seed_named(APPS["travel"], "small-0").variables["CURRENT_DATE"])
    days = {"check_in": str(today + timedelta(3)), "check_out": str(today + timedelta(4))}
    response = platform.call(instance_id, "stay.quote_booking", {"room_id": 1, **days, "rooms": 1, "guests": 1})
    assert not response["isError"], response
    tables = platform.runner(instance_id, "resources/sqlite/current/describe", method="GET").json()["tables"]
    assert {table["name"].partition("_")[0] for table in tables} == {"mail", "stay"}
    assert "stay_bookings" in {table["name"] for table in tables}
    assert platform.runner(instance_id, "diff/structured", {}).json()["diff"] == {}


def test_a_world_goes_to_disk_between_calls_and_comes_back():
    task = make_task(TASK)
    with InstancePool(PoolLimits(max_resident_bytes=1)) as pool:
        record = pool.create("a", InstanceSpec(app="travel", data=task.seed.key, version=task.app.version))
        for one in solution(task):
            assert pool.usage().spilled == 1
            with pool.use(record.id) as instance:
                assert not instance.call(one.tool, one.arguments).is_error
        with pool.use(record.id) as instance:
            assert verify(task, instance).score == 1.0
