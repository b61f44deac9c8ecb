"""Tools as models see them: in OpenAI's format, made from what MCP servers return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from palestra.environments.platform import golden
from palestra.types.openai import ChatTool
from palestra.util.json_types import JsonMapping

DROPPED = ("title", "default")

SUBMIT: ChatTool = {"type": "function", "function": msgspec.to_builtins(golden.SUBMIT)}


def openai_tool(name: str, description: str | None, schema: JsonMapping | None) -> ChatTool:
    given = schema or {}
    parameters = {
        "type": "object",
        "properties": {key: _plain(value) for key, value in (given.get("properties") or {}).items()},
        "required": list(given.get("required") or []),
    }
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": parameters}}


def name_of(tool: ChatTool) -> str:
    return tool["function"]["name"]


def in_a_line(tool: ChatTool) -> str:
    """Returns a line such as `set(name: string, value: integer, note?: string) Give an item a value.`"""
    function = tool["function"]
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or []
    shown = (
        f"{name}{'' if name in required else '?'}: {_type_of(schema)}"
        for name, schema in (parameters.get("properties") or {}).items()
    )
    return f"{function['name']}({', '.join(shown)}) {function.get('description') or ''}".rstrip()


def in_lines(tools: Sequence[ChatTool]) -> str:
    return "\n".join(map(in_a_line, tools))


def _plain(schema: object) -> Any:
    """Removes what models need not read: titles, defaults, null among the types, tuples."""
    if not isinstance(schema, Mapping):
        return schema
    found = {key: value for key, value in schema.items() if key not in DROPPED}
    if branches := found.pop("anyOf", None):
        chosen = next((one for one in branches if not _is_null(one)), branches[0])
        found |= chosen if isinstance(chosen, Mapping) else {}
        found = {key: value for key, value in found.items() if key not in DROPPED}
    if items := found.pop("prefixItems", None):
        found["items"] = items[0]
    if "properties" in found:
        found["properties"] = {key: _plain(value) for key, value in found["properties"].items()}
    if "items" in found:
        found["items"] = _plain(found["items"])
    return found


def _is_null(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"


def _type_of(schema: object) -> str:
    if not isinstance(schema, Mapping):
        return "any"
    if "enum" in schema:
        return "|".join(map(str, schema["enum"]))
    kind = schema.get("type", "any")
    return f"{_type_of(schema.get('items'))}[]" if kind == "array" else str(kind)
