"""With OpenEnv's own clients, in a venv of its own: plays at the address given, says what it saw as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from openenv.core import GenericEnvClient  # pyright: ignore
from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction  # pyright: ignore
from openenv.core.env_server.types import Action  # pyright: ignore
from openenv.core.mcp_client import MCPToolClient  # pyright: ignore

MANY = 20


class FinishAction(Action):  # pyright: ignore
    type: Literal["finish"] = "finish"
    answer: str | None = None


def generic(url: str, task_key: str, calls: list) -> dict[str, Any]:
    with GenericEnvClient(base_url=url).sync() as client:
        first = client.reset(task_key=task_key)
        tools = client.step({"type": "list_tools"}).observation["tools"]
        results = []
        for tool, arguments in calls:
            action = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
            results.append(client.step(action).observation["result"])
        state = client.state()
        last = client.step({"type": "finish"})
        return {
            "prompt": first.observation["prompt"],
            "tools": [tool["name"] for tool in tools],
            "results": results,
            "steps": state["step_count"],
            "end": [last.reward, last.done],
            "after": refused(lambda: client.step({"type": "finish"})),
            "unknown": refused(lambda: client.reset(task_key="nothing")),
            "again": client.reset(split="eval", index=3).observation["metadata"]["split"],
        }


def with_tools(url: str, task_key: str, calls: list) -> dict[str, Any]:
    with MCPToolClient(base_url=url).sync() as client:
        first = client.reset(task_key=task_key)
        tools = [tool.name for tool in client.list_tools()]
        results = [client.call_tool(tool, **arguments) for tool, arguments in calls]
        listed = client.step(ListToolsAction()).observation
        wrong = client.step(CallToolAction(tool_name="launch", arguments={})).observation
        steps = client.state().step_count
        last = client.step(FinishAction())
        return {
            "prompt": first.observation.prompt,
            "tools": tools,
            "same": [tool.name for tool in listed.tools] == tools,
            "wrong": wrong.error.error_type.value,
            "results": results,
            "steps": steps,
            "end": [last.reward, last.done],
        }


async def many(url: str, task_key: str, calls: list) -> int:
    """At once, each with a world of its own."""

    async def one(is_solved: bool) -> float:
        async with GenericEnvClient(base_url=url) as client:
            await client.reset(task_key=task_key)
            for tool, arguments in calls if is_solved else ():
                await client.step({"type": "call_tool", "tool_name": tool, "arguments": arguments})
            return (await client.step({"type": "finish"})).reward

    rewards = await asyncio.gather(*(one(number % 2 == 0) for number in range(MANY)))
    return sum(reward == float(number % 2 == 0) for number, reward in enumerate(rewards))


def refused(call: Any) -> bool:
    try:
        call()
    except RuntimeError:
        return True
    return False


def main(url: str, task_key: str, calls: str) -> None:
    args = (url, task_key, json.loads(calls))
    print(json.dumps({"generic": generic(*args), "tools": with_tools(*args), "many": asyncio.run(many(*args))}))


main(*sys.argv[1:])
