"""Tools of a Messages call: those that the prompt lists, and those that wait until a result refers to them.

A deferred tool is not listed. When the result of the client's own search refers to it, the reference becomes the tool's
definition, in its place in the conversation: so the prompt before it stays as it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.server.core.wire_errors import shown
from palestra.server.model_api.anthropic_messages.errors import wrong
from palestra.server.model_api.hosted_tools import LeftOutTools, ToolSettings
from palestra.types.openai import ChatTool
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonObject

CLIENT_RUN = (None, "custom")
SEARCH = "tool_search_tool"
"""Prefix of the types of Anthropic's own search for deferred tools."""
REFERENCE = "tool_reference"


@dataclass(frozen=True, slots=True)
class MessagesTools:
    listed: list[ChatTool] = field(default_factory=list)
    deferred: dict[str, ChatTool] = field(default_factory=dict)
    """By name."""
    ignored: list[str] = field(default_factory=list)


def read_tools(given: Sequence[JsonObject], settings: ToolSettings) -> MessagesTools:
    left_out = LeftOutTools(settings)
    found = MessagesTools(ignored=left_out.ignored)
    for i, tool in enumerate(given):
        if tool.get("type") not in CLIENT_RUN:
            left_out.take(tool["type"], f"tools[{i}]")
    can_search = not any(str(tool.get("type")).startswith(SEARCH) for tool in given)
    for i, tool in enumerate(given):
        if tool.get("type") in CLIENT_RUN:
            converted = _tool(tool, f"tools[{i}]", left_out)
            if tool.get("defer_loading") and can_search:
                found.deferred[str(tool.get("name"))] = converted
            else:  # without a search that would find it, it is listed from the beginning
                found.listed.append(converted)
    return found


def _tool(given: JsonObject, where: str, left_out: LeftOutTools) -> ChatTool:
    callers = given.get("allowed_callers")
    if callers is not None and "direct" not in callers:
        raise wrong(where, f"allowed_callers: {shown(callers)} is not supported; the model calls every tool itself")
    if given.get("input_examples"):
        left_out.ignored.append(f"input_examples.{given.get('name')}")
    if not isinstance(given.get("input_schema"), dict):
        raise wrong(where, f"input_schema is {shown(given.get('input_schema'))}; it must be a JSON schema")
    function: Any = {"name": given.get("name")}
    if given.get("description") is not None:
        function["description"] = given["description"]
    function["parameters"] = given["input_schema"]
    if given.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def with_references(messages: Sequence[Message], tools: MessagesTools) -> tuple[list[Message], Mapping[str, ChatTool]]:
    """Returns the messages with the definitions of tools instead of references to them, and the deferred tools that
    were referred to."""
    shown_tools: dict[str, ChatTool] = {}
    known = {str(tool["function"]["name"]): tool for tool in tools.listed} | tools.deferred

    def definition(block: Any, where: str) -> Any:
        if not isinstance(block, dict) or block.get("type") != REFERENCE:
            return block
        name = block.get("tool_name")
        if name not in known:
            raise wrong(where, f"it refers to the tool {shown(name)}, which is not among the tools")
        if name in tools.deferred:
            shown_tools[name] = known[name]
        return {"type": "text", "text": json.dumps(known[name], ensure_ascii=False)}

    def result(block: Any, where: str) -> Any:
        content = block.get("content") if isinstance(block, dict) and block.get("type") == "tool_result" else None
        if not isinstance(content, list):
            return block
        return {**block, "content": [definition(one, f"{where}.content[{i}]") for i, one in enumerate(content)]}

    found: list[Message] = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            blocks = [result(one, f"messages[{i}].content[{j}]") for j, one in enumerate(content)]
            message = {**message, "content": blocks}
        found.append(message)
    return found, shown_tools
