"""A task through the client of an OpenEnv package; run in a Python that has openenv and finds the package."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def played(package: Any, cls: str, url: str, task_key: str, calls: list[Any], answer: str | None) -> dict[str, Any]:
    action, client = getattr(package, f"{cls}Action"), getattr(package, f"{cls}Env")
    with client(base_url=url).sync() as env:
        first = env.reset(task_key=task_key)
        tools = env.step(action(type="list_tools")).observation.tools
        results = [env.step(action(tool_name=tool, arguments=given)).observation.result for tool, given in calls]
        end = env.step(action(type="finish", answer=answer))
        return {
            "prompt": first.observation.prompt,
            "tools": [tool["name"] for tool in tools],
            "results": results,
            "end": [end.reward, end.done],
            "steps": env.state().step_count,
        }


if __name__ == "__main__":
    name, cls, url, task_key, calls, answer = sys.argv[1:]
    package, known = importlib.import_module(name), json.loads(calls)
    gold = played(package, cls, url, task_key, known, json.loads(answer))
    print(json.dumps({"gold": gold, "null": played(package, cls, url, task_key, [], None)["end"]}))
