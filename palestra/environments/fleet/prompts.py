"""Texts that the model reads in a Fleet task: the system message, and the messages after each turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum

from palestra.environments.fleet.records import FleetTask
from palestra.environments.fleet.tool_schemas import in_lines, name_of
from palestra.environments.platform.scripted_user import TALK
from palestra.types.openai import ChatTool

CALL_FORMAT = '<tool_call>{"name": "tool_name", "arguments": {"param": "value"}}</tool_call>'
CURRENT_DATE, USER, NAME = "CURRENT_DATE", "LOGGED_IN_USER", "LOGGED_IN_NAME"

YEARS = "A date without a year is in the current year or in the future."
RESPONSES = (
    "Every response ends with exactly one tool call or with <done>. When the task is complete, give the answer first, "
    "then <done>. Never respond with only a message, and never offer further help."
)

TALKING = (
    "Every response is one tool call, or a message to the user, whose answer you then read. When the case is done, "
    "write <done>."
)

HINTS = {
    "fostgres": (
        "This is a PostgreSQL database. Look at its schema first: list the tables and their columns before you write "
        "a query."
    )
}
"""Hints by env_key."""


class PromptStyle(StrEnum):
    FULL = "full"
    COMPACT = "compact"
    """One line for each tool instead of its JSON Schema, and short texts: for small models and long lists of tools."""


def system_prompt(task: FleetTask, tools: Sequence[ChatTool], style: PromptStyle = PromptStyle.FULL) -> str:
    return _compact(task, tools) if style is PromptStyle.COMPACT else _full(task, tools)


def today_of(task: FleetTask) -> str:
    """Returns the world's own date: a task of last year is about last year, whenever it is played."""
    given = task.env_variables.get(CURRENT_DATE)
    return str(given)[:10] if given else datetime.now(UTC).date().isoformat()


def _full(task: FleetTask, tools: Sequence[ChatTool]) -> str:
    context = "\n".join(_context(task))
    sections = [
        "You are a helpful agent. Complete the task by calling the tools below.",
        f"## Current Date\nToday's date is {today_of(task)}. {YEARS}",
        f"## Environment Context\n{context}" if context else "",
        HINTS.get(task.env_key, ""),
        f"## Available Tools\n{json.dumps(list(tools), indent=2)}",
        f"## Tool Call Format\nTo call a tool, write:\n{CALL_FORMAT}",
        "## Error Handling\nWhen a call fails, read the error. Do not repeat the identical call: change your approach.",
        f"## Response Format\n{TALKING if _has_user(tools) else RESPONSES}",
    ]
    return "\n\n".join(section for section in sections if section)


def _compact(task: FleetTask, tools: Sequence[ChatTool]) -> str:
    who = " ".join(str(task.env_variables[key]) for key in (NAME, USER) if task.env_variables.get(key))
    lines = [
        f"Today: {today_of(task)}." + (f" You: {who}." if who else ""),
        in_lines(tools),
        f"{CALL_FORMAT} calls a tool. <done> ends." + (" All else is said to the user." if _has_user(tools) else ""),
    ]
    return "\n".join(lines)


def _has_user(tools: Sequence[ChatTool]) -> bool:
    return TALK in map(name_of, tools)


def _context(task: FleetTask) -> list[str]:
    given = {key: value for key, value in task.env_variables.items() if value not in (None, "")}
    found = [f"- Logged-in user ID: {given[USER]}"] if USER in given else []
    found += [f"- Logged-in user name: {given[NAME]}"] if NAME in given else []
    return found + [
        f"- {key}: {value}" for key, value in given.items() if key not in (USER, NAME, CURRENT_DATE) and key[0] != "_"
    ]


NO_CALL = 'No tool call found. Use <tool_call>{"name": "...", "arguments": {...}}</tool_call> format.'
COMPLETE = "Task marked as complete."
EXECUTED = "Action executed."
RESULT = "Tool result:\n"


def error_of(result: object) -> str | None:
    """Returns the error in a result: some tools report a failure in their text."""
    if isinstance(result, str) and result.startswith(("Error:", "error:")):
        return result.partition(":")[2].strip() or result
    if isinstance(result, Mapping) and result.get("error") is not None:
        return text_of(result["error"]) if set(result) == {"error"} else text_of(result)
    return None


def result_text(result: object, indent: int | None = 2) -> str:
    """Formats a result; None: the tool returned nothing."""
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
    """Returns the text for an invalid call; for a message without any call if `problem` is empty."""
    return f"No tool call found: {problem}. {NO_CALL.partition('. ')[2]}" if problem else NO_CALL
