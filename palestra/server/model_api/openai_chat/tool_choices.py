"""The tools that an answer may call, and whether it has to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palestra.chat.tool_parsers.lark import AS_TRAINED
from palestra.server.core.errors import ApiError
from palestra.server.core.wire_errors import shown
from palestra.server.model_api.errors import invalid
from palestra.server.model_api.openai_chat.schemas import ChatRequest
from palestra.util.json_types import JsonObject

Tool = JsonObject

BEST_EFFORT = {"x-guidance": AS_TRAINED | {"lenient": True}}
"""Ignores what a grammar cannot express of a schema, if `strict` is not requested."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    tools: Sequence[Tool]
    """Tools with the schemas that the grammar follows."""
    is_required: bool
    several: bool
    is_free: bool
    """Whether the model may answer anything."""


def tool_choice_of(call: ChatRequest) -> ToolChoice | None:
    """Returns the choice; None: no tool can be called. The tools must have been checked."""
    given = call.tool_choice
    tools = call.callable_tools
    match given:
        case None | "auto":
            return _choice(call, tools, required=False, chosen=False) if tools else None
        case "none":
            return None
        case "required":
            return _choice(call, _some(tools), required=True, chosen=False)
        case {"type": "function", "function": {"name": str(name)}}:
            return _choice(call, [_named(name, _some(tools))], required=True, chosen=True)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*some]}}:
            allowed = [_named(_name(one), _some(tools)) for one in some]
            return _choice(call, _some(allowed), required=mode == "required", chosen=len(allowed) < len(tools))
        case _:
            raise _wrong(
                f'{shown(given)} is not a tool choice; send auto, none, required, {{"type": "function", "function": '
                '{"name": …}} or {"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
            )


def _choice(call: ChatRequest, tools: Sequence[Tool], *, required: bool, chosen: bool) -> ToolChoice:
    several = call.parallel_tool_calls is not False and not (required and len(tools) == 1 and chosen)
    return ToolChoice(
        tools=[_followed(tool, required) for tool in tools],
        is_required=required,
        several=several,
        is_free=several and not required and not chosen and not any(map(_is_strict, tools)),
    )


def _followed(tool: Tool, required: bool) -> Tool:
    """Returns the tool with the schema to follow: strict arguments follow the schema exactly; in a required call they
    do as far as possible; in a voluntary call they only have to be JSON."""
    function = tool["function"]
    if _is_strict(tool) or (required and function.get("parameters") is None):
        return tool
    parameters = BEST_EFFORT | function["parameters"] if required else {"type": "object"}
    return {**tool, "function": {**function, "parameters": parameters}}


def _is_strict(tool: Tool) -> bool:
    return bool(tool["function"].get("strict"))


def _name(tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
        case _:
            raise _wrong(f'{shown(tool)} among the allowed tools; each is {{"type": "function", "name": …}}')


def _named(name: str, tools: Sequence[Tool]) -> Tool:
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    known = ", ".join(str(tool["function"]["name"]) for tool in tools)
    raise _wrong(f"there is no tool {shown(name)}; the tools are: {known}")


def _some(tools: Sequence[Tool]) -> Sequence[Tool]:
    if not tools:
        raise _wrong("there are no tools to choose from; send some in tools that the client runs itself")
    return tools


def _wrong(detail: str) -> ApiError:
    return invalid("tool_choice", f"tool_choice: {detail}")
