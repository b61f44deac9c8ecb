"""The tools that the bundled model was taught, and somebody who answers its calls."""

from __future__ import annotations

import json
from typing import Any

SYSTEM = {"role": "system", "content": "You answer questions about a stockroom."}
STOCK = {"cups": 12, "hats": 31}


def _tool(name: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


TOOLS = [
    _tool("count", item="string"),
    _tool("add", a="integer", b="integer"),
    _tool("subtract", a="integer", b="integer"),
]


def result(call: Any) -> dict[str, Any]:
    """What the tool says."""
    arguments = json.loads(call.function.arguments)
    values = {"count": lambda item: STOCK.get(item, 0), "add": lambda a, b: a + b, "subtract": lambda a, b: a - b}
    try:
        content = str(values[call.function.name](**arguments))
    except (KeyError, TypeError) as error:
        content = f"Error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": content}


def question(text: str = "How many cups and hats are there together?") -> list[dict[str, Any]]:
    return [SYSTEM, {"role": "user", "content": text}]
