"""With unmodified fleet-python, in a venv of its own: all it is given is FLEET_BASE_URL and a key.

Says what it saw as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from fleet import AsyncFleet, Fleet  # pyright: ignore
from fleet.exceptions import (  # pyright: ignore
    FleetAPIError,
    FleetEnvironmentNotFoundError,
    FleetInstanceLimitError,
    FleetVersionNotFoundError,
)
from fleet.tasks import Task  # pyright: ignore

OWN = """
def check(env, final_answer=None):
    env.instance.load()
    seed, now = env.db("seed"), env.db("current")
    print("rows", now.table("numbers").count())
    try:
        seed.diff(now, IgnoreConfig()).expect_only_v2(
            [{"table": "numbers", "pk": 1, "type": "insert", "fields": [("id", 1), ("value", 41)]}]
        )
    except AssertionError as error:
        return TASK_FAILED_SCORE
    return TASK_SUCCESSFUL_SCORE if final_answer == "done" else TASK_FAILED_SCORE
"""


def refused(kind, call) -> bool:
    try:
        call()
    except kind:
        return True
    return False


def walk(task_key: str, calls: list) -> dict:
    fleet = Fleet()
    told: dict = {"envs": [env.env_key for env in fleet.list_envs()], "regions": fleet.list_regions()}
    told["environment"] = fleet.environment("keys").default_version
    before = fleet.account().instance_count

    (task,) = fleet.load_tasks(keys=[task_key])
    told["task"] = [task.key, task.env_id, task.data_id, bool(task.verifier_func)]
    env = fleet.make(f"{task.env_id}:{task.version}", data_key=task.data_id, ttl_seconds=300, run_id="walk")
    told["running"] = fleet.account().instance_count - before
    told["status"] = [env.status, env.data_key, env.run_id]
    told["tools"] = len(asyncio.run(async_tools(env.instance_id)))
    told["none"] = task.verify(env)
    for tool, arguments in calls:
        tool_call(env.mcp.url, tool, arguments)
    told["done"] = task.verify(env)
    told["again"] = task.verify_detailed(env).success

    env.instance.load()
    current = env.db("current")
    told["tables"] = sorted(table.name for table in current.describe().tables)
    told["numbers"] = current.query("SELECT value FROM numbers").rows
    told["items"] = current.table("items").count() == env.db("seed").table("items").count()
    told["changed"] = {
        t: len(d["added_rows"]) for t, d in env.db("seed").diff(current).changes.items() if d["total_changes"]
    }
    told["heartbeat"] = env.heartbeat().success
    told["reset"] = env.reset().success
    told["after_reset"] = current.query("SELECT value FROM numbers").rows

    current.exec("INSERT INTO numbers (value) VALUES (41)")
    own = Task(key="of-my-own", prompt="p", env_id="keys", verifier_func=OWN)
    first = own.verify_detailed(env, final_answer="done")
    told["own"] = [first.success, first.result, "rows 1" in first.stdout, own.verify(env, final_answer="no")]
    told["raw"] = env.verify_raw(OWN, "check").result

    told["instances"] = [one.instance_id for one in fleet.instances(run_id="walk")] == [env.instance_id]
    told["runs"] = [run.run_id for run in fleet.list_runs()]
    told["closed"] = [env.close().status, env.close().status, fleet.instance(env.instance_id).status]
    fleet.make("keys", run_id="walk")
    told["close_all"] = len(fleet.close_all(run_id="walk"))
    told["left"] = fleet.account().instance_count - before

    began = time.monotonic()
    told["refused"] = [
        refused(FleetEnvironmentNotFoundError, lambda: fleet.make("kyes")),
        refused(FleetVersionNotFoundError, lambda: fleet.make("keys:v9")),
        refused(FleetAPIError, lambda: fleet.instance("0" * 32)),
        refused(FleetInstanceLimitError, lambda: [fleet.make("keys", run_id="many") for _ in range(9)]),
    ]
    fleet.close_all(run_id="many")
    told["without_waiting"] = time.monotonic() - began < 4
    return told


async def async_tools(instance_id: str) -> list:
    env = await AsyncFleet().instance(instance_id)
    return await env.mcp.list_tools()


def tool_call(url: str, tool: str, arguments: dict) -> None:
    import httpx

    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}
    assert not httpx.post(url, json=body).json()["result"]["isError"]


print(json.dumps(walk(sys.argv[1], json.loads(sys.argv[2]))))
