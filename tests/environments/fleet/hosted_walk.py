"""One task through `fleet_task` and the unmodified SDK; run in a Python that has fleet-python, mcp and msgspec."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from palestra.environments.fleet import FleetTaskEnv


async def played(tasks_file: str, task_key: str, actions: list[str]) -> dict[str, Any]:
    config = {"tasks_file": tasks_file, "backend": "fleet"}
    env = FleetTaskEnv(config, {"task_key": task_key, "max_turns": 9})
    history, facts = await env.init_async([])
    try:
        steps = [await env.step_async(action) for action in actions]
    finally:
        await env.close_async()
    response = [step["observations"][0]["content"] for step in steps]
    tools = [tool["function"]["name"] for tool in facts["tools"]]
    return {
        "tools": tools,
        "told": response,
        "rewards": [step["reward"] for step in steps],
        "system": history[0]["content"],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(played(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))))
