"""Fleet's control plane on the wire, with what the SDK must never see."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from palestra.environments.platform import APPS, make_task
from palestra.environments.platform.api.auth import PlatformAuth
from palestra.environments.platform.pool import CLOSED, CRASHED, OTHER_VERSION, TIMED_OUT, InstancePool
from palestra.environments.platform.pool_records import (
    InstanceGone,
    InstanceOver,
    InstanceRecord,
    InstanceSpec,
    InstanceState,
    PoolLimits,
)
from palestra.environments.platform.tasks import WORLDS
from tests.environments.platform.api.conftest import KEY, Platform, started

MADE_TO_WAIT = {404, 429, 500, 502, 503, 504}
"""Statuses that the SDK repeats for seconds."""


@pytest.fixture(scope="module")
def guarded() -> Iterator[Platform]:
    """One that wants a key, with room for three instances."""
    with InstancePool(PoolLimits(max_per_team=3, max_instances=5)) as pool:
        for url in started(pool, PlatformAuth([KEY, "other"], secret=b"of the tests")):
            yield Platform(pool, url)


def test_environments_are_listed(platform: Platform):
    found = {env["env_key"]: env for env in platform.http.get("/v1/env/").json()}
    assert found.keys() == APPS.keys()
    assert platform.http.get("/v1/env/keys").json() == found["keys"]
    assert found["keys"]["versions"] == {"v1": "v1"}


def test_an_instance_is_made_found_and_closed(platform: Platform):
    made = platform.make(data_key="tiny-3", env_variables={"LOGGED_IN_USER": 7, "MORE": [1]}, run_id="r1")
    assert made["status"] == "running"
    assert made["urls"]["root"] == f"{platform.url}/i/{made['instance_id']}/"
    assert (made["data_key"], made["env_variables"]) == ("tiny-3", {"LOGGED_IN_USER": "7", "MORE": "[1]"})
    one = f"/v1/env/instances/{made['instance_id']}"
    assert platform.http.get(one).json()["status"] == "running"
    assert [i["instance_id"] for i in platform.http.get("/v1/env/instances?run_id=r1").json()] == [made["instance_id"]]
    for _ in range(2):
        closed = platform.http.delete(one)
        assert (closed.status_code, closed.json()["status"]) == (200, "stopped")
        assert closed.json()["terminated_at"]
    assert platform.http.get("/v1/env/instances?run_id=r1").json() == []
    assert len(platform.http.get("/v1/env/instances?run_id=r1&status=stopped").json()) == 1
    assert platform.runner(made["instance_id"], "reset").status_code == 410


class RunnerResponse(BaseModel):
    """As the SDK reads whatever a runner answers: it does not look at the status."""

    success: bool
    message: str


def as_the_sdk_tells_it(body: object) -> str:
    with pytest.raises(ValidationError) as raised:
        RunnerResponse.model_validate(body)
    return str(raised.value)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "resources"),
        ("GET", "health"),
        ("POST", "reset"),
        ("GET", "resources/sqlite/current/describe"),
        ("POST", "resources/sqlite/current/query"),
        ("POST", "diff/structured"),
        ("POST", "execute_verifier_function"),
    ],
)
def test_the_runner_of_a_closed_instance_says_why_and_the_sdk_shows_all_of_it(
    platform: Platform, method: str, path: str
):
    instance_id = platform.make()["instance_id"]
    platform.http.delete(f"/v1/env/instances/{instance_id}")
    answer = platform.runner(instance_id, path, {"query": "SELECT 1", "function_code": "def v(env): 0"}, method)
    assert (answer.status_code, answer.json()["detail"]) == (410, "stopped: closed by its owner")
    assert "{'detail': 'stopped: closed by its owner'}" in as_the_sdk_tells_it(answer.json())


def test_no_reason_for_an_end_is_too_long_for_the_sdk():
    """Of a longer one pydantic shows the beginning and the end."""
    expected = InstanceSpec(app="keys", data="tiny-0", version="v1")
    response = [str(InstanceGone())]
    for reason in (CLOSED, TIMED_OUT, CRASHED, OTHER_VERSION):
        state = InstanceState.ERROR if reason in (CRASHED, OTHER_VERSION) else InstanceState.STOPPED
        response.append(str(InstanceOver(InstanceRecord("0" * 32, "a", expected, 0, 0, 1, state=state, reason=reason))))
    for detail in response:
        assert detail in as_the_sdk_tells_it({"detail": detail})


def test_a_ttl_beyond_a_day_is_cut_and_the_client_is_told(platform: Platform):
    day_s = 24 * 3600
    made = platform.make(ttl_seconds=10 * day_s)
    assert made["ttl_seconds"] == day_s
    assert made["warnings"] == ["ttl_seconds 864000 is more than the limit; it was reduced to 86400"]
    found = platform.http.get(f"/v1/env/instances/{made['instance_id']}").json()
    assert (found["ttl_seconds"], found["warnings"]) == (made["ttl_seconds"], made["warnings"])
    beat = platform.http.post(f"/v1/env/instances/{made['instance_id']}/heartbeat").json()
    assert beat["deadline_timestamp"] == platform.pool.record(made["instance_id"]).created_at + day_s
    for ttl_s in (day_s, None):
        usual = platform.make(ttl_seconds=ttl_s)
        assert (usual["ttl_seconds"], usual["warnings"]) == (ttl_s or 600, [])


def test_ids_cannot_be_guessed(platform: Platform):
    ids = {platform.make()["instance_id"] for _ in range(20)}
    assert len(ids) == 20
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"env_key": "kyes"}, "Environment 'kyes' not found"),
        ({"env_key": 3}, "Expected `str`"),
        ({"env_version": "v9"}, "Version 'v9' not found"),
        ({"data_version": "v9"}, "Version 'v9' not found"),
        ({"data_key": "kinesis"}, "a key looks like small-17"),
        ({"seed": -1}, "a key looks like small-17"),
        ({"p_error": 0.5}, "p_error is not supported"),
        ({"timestamp": 5}, "timestamp is not supported"),
        ({"image_type": "mcp"}, "no screens"),
        ({"ttl_seconds": 0}, "positive numbers"),
        ({"heartbeat_interval": -1}, "positive numbers"),
        ({"env_variables": {"CURRENT_DATE": "1999-01-01"}}, "CURRENT_DATE of this world is"),
        ({"env_variables": [1]}, "Expected `object"),
    ],
)
def test_what_cannot_be_made_is_refused_in_words(platform: Platform, fields: dict[str, object], told: str):
    answer = platform.http.post("/v1/env/instances", json={"env_key": "keys", **fields})
    assert answer.status_code == 400
    assert told in answer.json()["detail"]


def test_fields_of_newer_sdks_pass(platform: Platform):
    platform.make(created_from="sdk", max_wait_seconds=870, force_pull=None, region="us-west-1", brand_new={"a": 1})


def test_a_request_id_makes_one_instance(platform: Platform):
    headers = {"X-Request-ID": "the-same"}
    first, again = (
        platform.http.post("/v1/env/instances", json={"env_key": "keys"}, headers=headers).json() for _ in range(2)
    )
    assert first["instance_id"] == again["instance_id"]
    other = platform.http.post("/v1/env/instances", json={"env_key": "keys", "seed": 1}, headers=headers)
    assert (other.status_code, other.json()["detail"]["error"]) == (409, "duplicate_request_id")


def test_limits_are_told_with_their_counts(guarded: Platform):
    ids = [guarded.make()["instance_id"] for _ in range(3)]
    answer = guarded.http.post("/v1/env/instances", json={"env_key": "keys"})
    assert answer.status_code == 403
    detail = answer.json()["detail"]
    assert (detail["error_type"], detail["running_instances"], detail["instance_limit"]) == (
        "instance_limit_exceeded",
        3,
        3,
    )
    account = guarded.http.get("/v1/account").json()
    assert (account["instance_count"], account["instance_limit"]) == (3, 3)
    for instance_id in ids:
        guarded.http.delete(f"/v1/env/instances/{instance_id}")
    assert guarded.http.get("/v1/account").json()["instance_count"] == 0


def test_a_key_opens_its_own_instances_only(guarded: Platform):
    made = guarded.make()
    one = f"/v1/env/instances/{made['instance_id']}"
    other = {"Authorization": "Bearer other"}
    assert guarded.stranger.get(one).status_code == 401
    assert guarded.stranger.get(one, headers={"Authorization": "Bearer wrong"}).status_code == 401
    for method in ("GET", "DELETE"):
        assert guarded.stranger.request(method, one, headers=other).status_code == 410
    assert guarded.stranger.post(f"{one}/heartbeat", headers=other).status_code == 410
    assert guarded.stranger.get("/v1/env/instances", headers=other).json() == []
    assert guarded.http.get(one).json()["status"] == "running"
    guarded.http.delete(one)


def test_the_runner_opens_to_the_team_and_not_to_who_knows_the_id(guarded: Platform):
    made = guarded.make()
    path = f"/i/{made['instance_id']}/api/v1/env/resources"
    other = guarded.stranger.get("/v1/runner-auth/token", headers={"Authorization": "Bearer other"}).json()["token"]
    own = guarded.http.get("/v1/runner-auth/token").json()["token"]
    assert guarded.stranger.get(path).status_code == 403
    assert guarded.stranger.get(path, headers={"X-Runner-Token": other}).status_code == 403
    assert guarded.stranger.get(path, headers={"X-Runner-Token": "ünï".encode()}).status_code == 403
    assert guarded.stranger.get(path, headers={"Authorization": "Bearer other"}).status_code == 403
    assert guarded.stranger.get(path, headers={"X-Runner-Token": own}).status_code == 200
    assert guarded.http.get(path).status_code == 200
    assert guarded.stranger.get(f"/i/{made['instance_id']}/").json()["app"] == "keys"
    guarded.http.delete(f"/v1/env/instances/{made['instance_id']}")


def test_a_heartbeat_says_when_the_next_is_due(platform: Platform):
    made = platform.make(heartbeat_interval=30, ttl_seconds=900)
    response = platform.http.post(f"/v1/env/instances/{made['instance_id']}/heartbeat", json={}).json()
    assert (response["success"], response["interval_seconds"]) == (True, 30)
    assert response["deadline_timestamp"] > 0
    platform.http.delete(f"/v1/env/instances/{made['instance_id']}")
    assert not platform.http.post(f"/v1/env/instances/{made['instance_id']}/heartbeat").json()["success"]


def test_runs_are_counted_and_closed_together(platform: Platform):
    for _ in range(2):
        platform.make(run_id="together")
    (run,) = [run for run in platform.http.get("/v1/env/runs").json() if run["run_id"] == "together"]
    assert (run["running_count"], run["total_count"]) == (2, 2)
    assert platform.http.delete("/v1/env/instances/batch").status_code == 400
    assert len(platform.http.delete("/v1/env/instances/batch?run_id=together").json()) == 2
    active = platform.http.get("/v1/env/runs?active=active").json()
    assert "together" not in [run["run_id"] for run in active]


def test_all_of_a_team_are_closed_by_its_own_profile_only(guarded: Platform):
    kept = guarded.make()["instance_id"]
    assert guarded.http.delete("/v1/env/instances/batch?profile_id=others").status_code == 400
    assert guarded.http.get(f"/v1/env/instances/{kept}").json()["status"] == "running"
    ran = guarded.make(run_id="one")["instance_id"]
    closed = guarded.http.delete("/v1/env/instances/batch?profile_id=self").json()
    assert {one["instance_id"] for one in closed} == {kept, ran}


def test_tasks_come_by_key_and_by_app(platform: Platform):
    task = make_task("keys-put_number-0b-17")
    response = platform.http.get("/v1/tasks/keys-put_number-0b-17").json()
    assert (response["prompt"], response["data_id"], response["environment_id"]) == (task.prompt, task.seed.key, "keys")
    assert response["verifier"]["code"] == response["verifier_func"]
    assert (
        platform.http.get(f"/v1/verifiers/{response['verifier_id']}").json()["sha256"] == response["verifier"]["sha256"]
    )
    listed = platform.http.get("/v1/tasks", params={"env_key": "keys", "per_template": 2, "split": "eval"}).json()
    assert len(listed["tasks"]) == 2 * len(APPS["keys"].templates)
    assert {task["metadata"]["split"] for task in listed["tasks"]} == {"eval"}
    two = ["keys-put_number-0b-17", "keys-largest-2-3"]
    assert [t["key"] for t in platform.http.get("/v1/tasks", params={"task_keys": two}).json()["tasks"]] == two
    assert platform.http.get("/v1/tasks?env_key=keys&data_id=tiny-99999").json() == {"tasks": [], "total": 0}


def keys_of(platform: Platform, **params: object) -> list[str]:
    return [
        task["key"] for task in platform.http.get("/v1/tasks", params={"env_key": "keys", **params}).json()["tasks"]
    ]


def test_tasks_come_in_pages_and_a_page_needs_few_worlds(platform: Platform):
    """Building worlds is what a list of tasks takes its time for."""
    templates = len(APPS["keys"].templates)
    page = platform.http.get("/v1/tasks?env_key=keys&per_template=1&page=5").json()
    assert {task["data_id"] for task in page["tasks"]} == {"tiny-5", "small-5"}
    assert (len(page["tasks"]), page["total"]) == (templates, templates * WORLDS)
    assert len(keys_of(platform)) == 10 * templates
    assert keys_of(platform) == keys_of(platform, page=0)
    listed = [key for number in range(WORLDS // 10 + 1) for key in keys_of(platform, page=number)]
    assert len(set(listed)) == len(listed) == page["total"]
    assert keys_of(platform, page=7) == []


def test_tasks_of_one_world_are_found_by_its_name(platform: Platform):
    listed = platform.http.get("/v1/tasks?env_key=keys&data_id=small-17").json()["tasks"]
    assert {task["data_id"] for task in listed} == {"small-17"}


def test_a_list_leaves_it_to_the_client_when_to_compile_a_verifier(platform: Platform):
    """The SDK compiles what comes as `verifier` while it reads the list, and `verifier_func` when it is first used."""
    for one in platform.http.get("/v1/tasks?env_key=keys&per_template=1").json()["tasks"]:
        assert "verifier" not in one
        assert "def verify_" in one["verifier_func"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/env/nothing"),
        ("GET", f"/v1/env/instances/{'0' * 32}"),
        ("DELETE", f"/v1/env/instances/{'0' * 32}"),
        ("POST", f"/v1/env/instances/{'0' * 32}/heartbeat"),
        ("GET", "/v1/tasks/nothing"),
        ("GET", "/v1/tasks?task_keys=nothing"),
        ("GET", "/v1/tasks?per_template=many"),
        ("GET", "/v1/tasks?per_template=65"),
        ("GET", "/v1/tasks?page=-1"),
        ("GET", f"/v1/tasks?per_template={'1' * 5000}"),
        ("GET", "/v1/env/instances?profile_id=others"),
        ("GET", "/v1/env/runs?profile_id=others"),
        ("DELETE", "/v1/env/instances/batch?profile_id=others"),
        ("POST", "/v1/tasks"),
        ("PUT", "/v1/tasks/keys-put_number-0b-17"),
        ("GET", "/v1/verifiers/nothing"),
        ("POST", "/v1/verifiers/execute"),
        ("GET", "/v1/jobs"),
        ("PATCH", "/v1/env/instances"),
        ("GET", "/nowhere"),
        ("GET", f"/i/{'0' * 32}/api/v1/env/resources"),
        ("GET", f"/i/{'0' * 32}/"),
    ],
)
def test_nothing_that_can_be_expected_makes_the_sdk_wait(platform: Platform, method: str, path: str):
    answer = platform.http.request(method, path)
    assert 400 <= answer.status_code < 500
    assert answer.status_code not in MADE_TO_WAIT
    assert answer.json()["detail"]


def test_bodies_have_a_bound(platform: Platform):
    assert platform.http.post("/v1/env/instances", content=b" " * (5 << 20)).status_code == 413


def test_many_clients_at_once_each_have_their_own_state(platform: Platform):
    """32 instances, 8 clients at a time."""
    wrong: list[str] = []

    def play(numbers: range) -> None:
        with httpx.Client(base_url=platform.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as client:
            for number in numbers:
                made = client.post("/v1/env/instances", json={"env_key": "keys", "run_id": "crowd"}).json()
                for value in (number, number + 1):
                    params = {"name": "put", "arguments": {"value": value}}
                    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
                    client.post(f"/i/{made['instance_id']}/mcp", json=message)
                query = {"query": "SELECT value FROM numbers ORDER BY id"}
                path = f"/i/{made['instance_id']}/api/v1/env/resources/sqlite/current/query"
                if client.post(path, json=query).json()["rows"] != [[number], [number + 1]]:
                    wrong.append(made["instance_id"])

    players = [threading.Thread(target=play, args=(range(n, 32, 8),)) for n in range(8)]
    for player in players:
        player.start()
    for player in players:
        player.join(60)
    assert wrong == []
    assert len(platform.http.delete("/v1/env/instances/batch?run_id=crowd").json()) == 32
