"""The apps of a world with unmodified fleet-python, in a venv of its own. Says what it saw as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request

from fleet import AsyncFleet, Fleet  # pyright: ignore
from fleet.tasks import Task  # pyright: ignore
from fleet.verifiers import IgnoreConfig  # pyright: ignore

OWN = """
def check(env, final_answer=None):
    mail = env.app("mail")
    mail.load()
    before, now = mail.db("seed"), mail.db("current")
    return float(now.table("events").count() == before.table("events").count() + 1)
"""


def tool_call(url: str, name: str, arguments: dict) -> None:
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
    request = urllib.request.Request(url, json.dumps(message).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        assert not json.load(answer)["result"].get("isError")


async def async_added(instance_id: str) -> int:
    env = await AsyncFleet().instance(instance_id)
    mail = env.app("mail")
    await mail.load()
    counts = [await mail.db(name).table("events").count() for name in ("seed", "current")]
    return counts[1] - counts[0]


def walk(task_key: str, calls: list) -> dict:
    fleet = Fleet()
    (task,) = fleet.load_tasks(keys=[task_key])
    env = fleet.make(task.env_id, data_key=task.data_id)
    for tool, arguments in calls:
        tool_call(env.mcp.url, tool, arguments)
    mail, stay = env.app("mail"), env.app("stay")
    mail.load()
    stay.load()
    before, now = mail.db("seed"), mail.db("current")
    response: dict = {"events": now.table("events").count() - before.table("events").count()}
    response["stay"] = stay.db("current").table("bookings").count() > 0
    response["async"] = asyncio.run(async_added(env.instance_id))
    stay.db("seed").diff(stay.db("current"), IgnoreConfig()).expect_only_v2([])
    try:
        before.diff(now, IgnoreConfig()).expect_only_v2([])
    except AssertionError:
        response["diff"] = True
    own = Task(key="own", prompt="x", env_id=task.env_id, verifier_func=OWN, verifier_id="own")
    response["own"] = own.verify(env)
    response["done"] = task.verify(env)
    env.close()
    return response


if __name__ == "__main__":
    print(json.dumps(walk(sys.argv[1], json.loads(sys.argv[2]))))
