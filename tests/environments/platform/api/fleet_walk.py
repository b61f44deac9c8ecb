"""With unmodified fleet-python, in a venv of its own: all it is given is FLEET_BASE_URL and a key.

Says what it saw as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from fleet import AsyncFleet, Fleet  # pyright: ignore
from fleet._async.resources.mcp import AsyncMCPResource  # pyright: ignore
from fleet.exceptions import (  # pyright: ignore
    FleetAPIError,
    FleetEnvironmentError,
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


DAY_S = 24 * 3600


def refused(kind, call) -> bool:
    try:
        call()
    except kind:
        return True
    return False


def raised(call) -> tuple[str, str]:
    """What it was, and its words."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def walk(task_key: str, calls: list) -> dict:
    fleet = Fleet()
    response: dict = {"envs": [env.env_key for env in fleet.list_envs()], "regions": fleet.list_regions()}
    response["environment"] = fleet.environment("keys").default_version
    before = fleet.account().instance_count

    (task,) = fleet.load_tasks(keys=[task_key])
    response["task"] = [task.key, task.env_id, task.data_id, bool(task.verifier_func)]
    env = fleet.make(f"{task.env_id}:{task.version}", data_key=task.data_id, ttl_seconds=300, run_id="walk")
    response["running"] = fleet.account().instance_count - before
    response["status"] = [env.status, env.data_key, env.run_id]
    response["tools"] = len(asyncio.run(async_tools(env.instance_id)))
    response["none"] = task.verify(env)
    for tool, arguments in calls:
        tool_call(env.mcp.url, tool, arguments)
    response["done"] = task.verify(env)
    response["again"] = task.verify_detailed(env).success

    env.instance.load()
    current = env.db("current")
    response["tables"] = sorted(table.name for table in current.describe().tables)
    response["numbers"] = current.query("SELECT value FROM numbers").rows
    response["items"] = current.table("items").count() == env.db("seed").table("items").count()
    response["changed"] = {
        t: len(d["added_rows"]) for t, d in env.db("seed").diff(current).changes.items() if d["total_changes"]
    }
    response["resources"] = sorted(resource.uri for resource in env.resources())
    response["defects"] = [raised(lambda: repr(env.resources()))[0], raised(env.mcp.list_tools)[0]]
    response["tools_without_a_loop"] = len(asyncio.run(AsyncMCPResource(env.mcp.url, env.env_key).list_tools()))
    response["heartbeat"] = env.heartbeat().success
    response["reset"] = env.reset().success
    response["after_reset"] = current.query("SELECT value FROM numbers").rows

    current.exec("INSERT INTO numbers (value) VALUES (41)")
    own = Task(key="of-my-own", prompt="p", env_id="keys", verifier_func=OWN)
    first = own.verify_detailed(env, final_answer="done")
    response["own"] = [first.success, first.result, "rows 1" in first.stdout, own.verify(env, final_answer="no")]
    response["raw"] = env.verify_raw(OWN, "check").result

    response["instances"] = [one.instance_id for one in fleet.instances(run_id="walk")] == [env.instance_id]
    response["runs"] = [run.run_id for run in fleet.list_runs()]
    response["closed"] = [env.close().status, env.close().status, fleet.instance(env.instance_id).status]
    response["after_close"] = after_close(fleet, env, task)
    long = fleet.make("keys", run_id="walk", ttl_seconds=10 * DAY_S)
    response["longest"] = DAY_S - 60 < long.heartbeat().deadline_timestamp - time.time() <= DAY_S
    response["close_all"] = len(fleet.close_all(run_id="walk"))
    response["left"] = fleet.account().instance_count - before

    began = time.monotonic()
    response["refused"] = [
        refused(FleetEnvironmentNotFoundError, lambda: fleet.make("kyes")),
        refused(FleetVersionNotFoundError, lambda: fleet.make("keys:v9")),
        refused(FleetAPIError, lambda: fleet.instance("0" * 32)),
        refused(FleetInstanceLimitError, lambda: [fleet.make("keys", run_id="many") for _ in range(9)]),
    ]
    fleet.close_all(run_id="many")
    response["without_waiting"] = time.monotonic() - began < 4
    response["lists"] = [len(fleet.load_tasks()), len(fleet.load_tasks(env_key="keys"))]
    response["async"] = asyncio.run(async_verdict(task_key))
    return response


def after_close(fleet: Fleet, env, task: Task) -> list[bool]:
    """Whether the reason is there, whole."""
    reason, current = "stopped: closed by its owner", env.db("current")
    fresh = fleet.instance(env.instance_id)
    response = [
        raised(lambda: current.query("SELECT 1")),
        raised(lambda: current.table("numbers").all()),
        raised(current.describe),
        raised(env.reset),
        raised(lambda: env.verify_raw(OWN, "check")),
        raised(lambda: task.verify(env)),
    ]
    return [reason in words for _, words in response] + [refused(FleetEnvironmentError, fresh.resources)]


async def async_verdict(task_key: str) -> float:
    fleet = AsyncFleet()
    (task,) = await fleet.load_tasks(keys=[task_key])
    env = await fleet.make(task.env_id, data_key=task.data_id)
    score = await task.verify_async(env)
    await env.close()
    return score


async def async_tools(instance_id: str) -> list:
    env = await AsyncFleet().instance(instance_id)
    return await env.mcp.list_tools()


def tool_call(url: str, tool: str, arguments: dict) -> None:
    import httpx

    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}
    assert not httpx.post(url, json=body).json()["result"]["isError"]


print(json.dumps(walk(sys.argv[1], json.loads(sys.argv[2]))))
