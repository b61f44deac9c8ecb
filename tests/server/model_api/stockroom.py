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


def answered(name: str, arguments: str) -> str:
    """What the tool says."""
    values = {"count": lambda item: STOCK.get(item, 0), "add": lambda a, b: a + b, "subtract": lambda a, b: a - b}
    try:
        return str(values[name](**json.loads(arguments)))
    except (KeyError, TypeError) as error:
        return f"Error: {error}"


def result(call: Any) -> dict[str, Any]:
    content = answered(call.function.name, call.function.arguments)
    return {"role": "tool", "tool_call_id": call.id, "content": content}


def question(text: str = "How many cups and hats are there together?") -> list[dict[str, Any]]:
    return [SYSTEM, {"role": "user", "content": text}]
