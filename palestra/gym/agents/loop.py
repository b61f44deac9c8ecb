"""The loop of a tool-using agent, exactly as NeMo Gym's `simple_agent` plays it.

Owns: turns, tool calls one after another, when to stop. Never touches: HTTP, who the model is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from palestra.gym.servers.resources import RESERVED
from palestra.gym.servers.responses import Item, added_usage, function_calls, has_message, input_items, tool_output
from palestra.util.json_types import JsonObject

Ask = Callable[[JsonObject], Awaitable[JsonObject]]
"""A whole request to the model, its checked Responses object."""
UseTool = Callable[[str, Any], Awaitable[str]]
"""A tool's name and arguments, what the model reads."""

NO_SUCH_TOOL = '{"detail":"Not Found"}'


async def play(
    params: JsonObject,
    ask: Ask,
    use_tool: UseTool,
    *,
    max_steps: int | None,
    calls_of: Callable[[list[Item]], list[Item]] = function_calls,
) -> JsonObject:
    """The last answer of the model, with the items of all turns and the sum of their usage."""
    first = input_items(params)
    produced: list[Item] = []
    usage, step = None, 0
    while True:
        step += 1
        await asyncio.sleep(0)  # servers of one process may answer without ever waiting: time limits must get through
        response = await ask({**params, "input": [*first, *produced]})
        output: list[Item] = response["output"]
        produced += output
        usage = added_usage(usage, response.get("usage"))
        calls = calls_of(output)
        if response.get("incomplete_details") or (not calls and has_message(output)):
            break
        for call in calls:
            produced.append(tool_output(call.get("call_id"), await _used(call, use_tool)))
        if max_steps and step >= max_steps:
            break
    return {**response, "output": produced, "usage": usage}


async def _used(call: Item, use_tool: UseTool) -> str:
    try:
        arguments = orjson.loads(call.get("arguments", ""))
    except orjson.JSONDecodeError as error:
        return orjson.dumps({"error": f"Invalid tool call arguments: {error!r}"}).decode()
    name = call.get("name")
    if not isinstance(name, str) or not is_tool_name(name):
        return NO_SUCH_TOOL
    return await use_tool(name, arguments)


def is_tool_name(name: str) -> bool:
    """A model must not verify itself: routes of the server are no tools, nor is a path that leads to one."""
    return (
        name not in RESERVED
        and name.isprintable()
        and not any(c in name for c in "/?#%\\ ")
        and name not in ("", ".", "..")
    )
