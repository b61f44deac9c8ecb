"""Tools of a Responses call as functions of a chat call, and calls of them as items of a response.

A tool of a namespace becomes a function whose name has the namespace in front. A custom tool, whose input is text,
becomes a function with that text as its only argument. Items of earlier calls are converted in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.chat.responses_input import Item
from palestra.chat.responses_output import call_item
from palestra.server.core.wire_errors import shown
from palestra.server.model_api.errors import invalid
from palestra.server.model_api.hosted_tools import LeftOutTools, ToolSettings
from palestra.server.model_api.openai_chat.events import ToolCall
from palestra.types.openai import ResponseItem
from palestra.util.json_types import JsonObject

INPUT = "input"
"""The argument of a custom tool."""
_PARAMETERS = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


@dataclass(frozen=True, slots=True)
class ToolIdentity:
    """A tool as its client knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTools:
    functions: list[JsonObject] = field(default_factory=list)
    """The tools as functions, in the form of the Responses API."""
    identities: dict[str, ToolIdentity] = field(default_factory=dict)
    """By the function's name, for those whose client knows them otherwise."""
    ignored: list[str] = field(default_factory=list)

    def item(self, call: ToolCall, status: str = "completed", *, is_begun: bool = False) -> ResponseItem:
        """Returns the item of a call; `is_begun`: before its arguments were sent."""
        known = self.identities.get(call.name)
        if known is None:
            return call_item(call.id, call.name, "" if is_begun else call.arguments, status)
        item: ResponseItem = call_item(call.id, known.name, "" if is_begun else call.arguments, status)
        if known.is_custom:
            item = {
                "id": call.id,
                "type": "custom_tool_call",
                "call_id": call.id,
                "name": known.name,
                "input": "" if is_begun else self.text(call),
                "status": status,
            }
        if known.namespace is not None:
            item["namespace"] = known.namespace
        return item

    def is_custom(self, call: ToolCall) -> bool:
        known = self.identities.get(call.name)
        return known is not None and known.is_custom

    def text(self, call: ToolCall) -> str:
        """Returns the input of a custom tool; a model may have called it with something else."""
        arguments = json.loads(call.arguments)
        text = arguments.get(INPUT) if isinstance(arguments, dict) else None
        return text if isinstance(text, str) else call.arguments


def read_tools(given: Sequence[JsonObject], settings: ToolSettings) -> ResponseTools:
    left_out = LeftOutTools(settings)
    found = ResponseTools(ignored=left_out.ignored)
    for place, identity, tool in _flat(given, settings, left_out):
        name = flat_name(identity)
        if any(name == one.get("name") for one in found.functions):
            raise invalid(place, f"{place}: there are two tools of the name {shown(name)}")
        found.functions.append(_function(tool, name, identity))
        if identity.is_custom or identity.namespace is not None:
            found.identities[name] = identity
    return found


def _flat(
    given: Sequence[JsonObject], settings: ToolSettings, left_out: LeftOutTools, namespace: str | None = None
) -> Iterator[tuple[str, ToolIdentity, JsonObject]]:
    for i, tool in enumerate(given):
        place, kind = f"tools[{i}]", tool.get("type", "function")
        name = tool.get("name")
        if kind in ("function", "custom"):
            identity = ToolIdentity(name if isinstance(name, str) else "", namespace, kind == "custom")
            yield place, identity, tool
        elif kind == "namespace" and namespace is None and isinstance(name, str):
            if settings.tool_namespaces == "leave_out":
                left_out.note(name)
            else:
                yield from _flat(tool.get("tools") or [], settings, left_out, name)
        else:
            left_out.take(kind, place)


def flat_name(tool: ToolIdentity) -> str:
    if tool.namespace is None:
        return tool.name
    return f"{tool.namespace.removesuffix('__')}__{tool.name}"


def _function(tool: JsonObject, name: str, identity: ToolIdentity) -> JsonObject:
    if not identity.is_custom:
        return tool if identity.namespace is None else {**tool, "name": name}
    described = [str(tool.get("description") or ""), *_grammar(tool.get("format"))]
    return {
        "type": "function",
        "name": name,
        "description": "\n\n".join(filter(None, described)),
        "parameters": _PARAMETERS,
    }


def _grammar(given: object) -> Iterator[str]:
    """Yields what is said about the text of a custom tool."""
    match given:
        case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
            yield f"Its input follows this {syntax} grammar:\n{definition}"
        case _:
            return


# What comes back


def as_functions(items: str | Sequence[Item]) -> str | list[Item]:
    """Returns the input with calls of all tools as calls of functions."""
    return items if isinstance(items, str) else [_as_function(item) for item in items]


def _as_function(item: Item) -> Item:
    kind, name, namespace = item.get("type"), item.get("name"), item.get("namespace")
    if kind == "custom_tool_call_output":
        return {**item, "type": "function_call_output"}
    if kind not in ("function_call", "custom_tool_call") or not isinstance(name, str):
        return item
    called: JsonObject = {
        **item,
        "name": flat_name(ToolIdentity(name, namespace if isinstance(namespace, str) else None)),
    }
    if kind == "custom_tool_call":
        arguments = json.dumps({INPUT: item.get("input")}, ensure_ascii=False)
        called |= {"type": "function_call", "arguments": arguments}
    return called


def chosen_function(choice: Any) -> Any:
    """Returns a tool choice with names of functions."""
    match choice:
        case {"type": "function" | "custom", "name": str()}:
            return _named(choice)
        case {"type": "allowed_tools", "tools": [*tools]}:
            return {**choice, "tools": [_named(one) if isinstance(one, Mapping) else one for one in tools]}
        case _:
            return choice


def _named(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    name, namespace = choice.get("name"), choice.get("namespace")
    if choice.get("type") not in ("function", "custom") or not isinstance(name, str):
        return choice
    identity = ToolIdentity(name, namespace if isinstance(namespace, str) else None)
    return {"type": "function", "name": flat_name(identity)}
