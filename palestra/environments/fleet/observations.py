"""What the model reads after its turn.

Owns: how results, errors and the rest are said. Never touches: what is true.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

NO_CALL = 'No tool call found. Use <tool_call>{"name": "...", "arguments": {...}}</tool_call> format.'
COMPLETE = "Task marked as complete."
EXECUTED = "Action executed."
RESULT = "Tool result:\n"


def error_of(result: object) -> str | None:
    """The error in a result that came back: some tools say in words that they failed."""
    if isinstance(result, str) and result.startswith(("Error:", "error:")):
        return result.partition(":")[2].strip() or result
    if isinstance(result, Mapping) and result.get("error") is not None:
        return text_of(result["error"]) if set(result) == {"error"} else text_of(result)
    return None


def result_text(result: object, indent: int | None = 2) -> str:
    """None: the tool had nothing to say."""
    return EXECUTED if result is None else RESULT + text_of(result, indent)


def text_of(value: object, indent: int | None = None) -> str:
    if isinstance(value, str) and value:
        return value
    separators = (",", ":") if indent is None else None
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, separators=separators)
    except (TypeError, ValueError):
        return str(value)


def problem_text(problem: str) -> str:
    """For a try at a call that cannot be read; none at all where there was no try."""
    return f"No tool call found: {problem}. {NO_CALL.partition('. ')[2]}" if problem else NO_CALL
