"""With unmodified fleet-python and mcp, in a venv of their own: the calls that Fleet's own `FleetTaskEnv` makes.

Plays each task of a file twice, once without doing anything. Says the rewards as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import httpx  # pyright: ignore
import mcp
from fleet._async import AsyncFleet  # pyright: ignore
from fleet._async.tasks import Task  # pyright: ignore


async def made(task: dict):
    data_key, data_version = task.get("data_key"), task.get("data_version")
    return await AsyncFleet(api_key=os.environ["FLEET_API_KEY"]).make(
        env_key=f"{task['env_key']}:{task['env_version']}",
        region=None,
        ttl_seconds=600,
        env_variables=task.get("env_variables"),
        image_type=None,
        data_key=f"{data_key}:{data_version}" if data_key and data_version else data_key,
    )


async def played(task: dict, calls: list, answer: str | None) -> tuple[float | None, int]:
    env = await made(task)
    key = {"Authorization": f"Bearer {os.environ['FLEET_API_KEY']}"}
    async with httpx.AsyncClient(headers=key, timeout=10) as http:
        reset = await http.post(f"{env.urls.manager.api}/reset", json={})
    assert reset.json()["success"], reset.text
    tools: dict[str, str] = {}
    for url in (f"{env.urls.root}mcp", f"{env.urls.root}api/v1/mcp"):
        async with mcp.Client(url, mode="legacy") as client:
            for tool in (await client.list_tools()).tools:
                tools.setdefault(tool.name, url)
    for name, arguments in calls:
        async with mcp.Client(tools[name], mode="legacy") as client:
            assert not (await client.call_tool(name, arguments)).is_error
    code = task.get("verifier_code") or task.get("verifier_func")
    judge = Task(key=task["task_key"], prompt=task["prompt"], env_id=task["env_key"], verifier_func=code)
    found = await judge.verify_detailed_async(env, **({} if answer is None else {"final_answer": answer}))
    await env.close()
    return (float(found.result) if found.success else None), len(tools)


async def main(rows: list, solutions: dict) -> dict:
    response: dict = {}
    for row in rows:
        names = (("task_key", "key"), ("env_key", "env_id"), ("env_version", "version"))
        task = {**{name: row[other] for name, other in names if other in row}, **row}
        idle, _ = await played(task, [], None)
        solved, tools = await played(task, **solutions[task["task_key"]])
        response[task["task_key"]] = {"idle": idle, "solved": solved, "tools": tools}
    return response


print(json.dumps(asyncio.run(main(json.loads(Path(sys.argv[1]).read_text()), json.loads(sys.argv[2])))))
