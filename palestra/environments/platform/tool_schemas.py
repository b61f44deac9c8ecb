"""Tools of an app: a typed Python function becomes a name, a JSON Schema and a checked call."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeAlias, TypedDict

import msgspec

from palestra.environments.platform.errors import ToolError
from palestra.util.json_types import JsonObject, JsonPayload

MAX_TEXT = 20_000  # characters of one argument: a mail, not a book
MAX_SHOWN = 100  # characters of a value that is repeated in an error


ToolOutput: TypeAlias = JsonPayload
"""What a tool returns, for the model to read."""


class ArgumentsSchema(TypedDict):
    """JSON Schema of a tool's arguments: a flat object."""

    type: str
    properties: dict[str, JsonObject]
    required: list[str]


class PlatformTool(msgspec.Struct, frozen=True):
    """A tool of an app, as models see it and as it is run."""

    name: str
    description: str
    parameters: ArgumentsSchema
    writes: bool
    """Whether it may change the state: then it moves the clock, too."""
    run: Callable[..., ToolOutput]
    """Takes the instance's `ToolContext` and the arguments."""
    arguments: type[msgspec.Struct]

    def checked(self, given: object) -> JsonObject:
        """Returns the arguments with defaults filled in. Raises ToolError."""
        if not isinstance(given, dict):
            raise ToolError("bad_arguments", f"arguments must be an object, found {_kind(given)}", self.usage)
        unknown = [name for name in given if name not in self.parameters["properties"]]
        if unknown:
            raise ToolError("bad_arguments", f"{self.name} has no argument {unknown[0][:MAX_SHOWN]!r}", self.usage)
        long = [name for name, value in given.items() if isinstance(value, str) and len(value) > MAX_TEXT]
        if long:
            raise ToolError("bad_arguments", f"{long[0]} is longer than {MAX_TEXT} characters", "shorten it")
        try:
            found = msgspec.convert(given, self.arguments)
        except msgspec.ValidationError as e:
            raise ToolError("bad_arguments", _error_text(str(e)), self.usage) from None
        return {name: getattr(found, name) for name in self.parameters["properties"]}

    @property
    def usage(self) -> str:
        """Returns a line such as `set(name: string, value: integer, note?: string)`."""
        required = self.parameters["required"]
        parts = (
            f"{name}{'' if name in required else '?'}: {_type_name(schema)}"
            for name, schema in self.parameters["properties"].items()
        )
        return f"{self.name}({', '.join(parts)})"


def tool(*, writes: bool = False, name: str | None = None) -> Callable[[Callable[..., ToolOutput]], PlatformTool]:
    """Decorates a function `(context, …arguments) -> dict`; the model reads the first line of its docstring."""

    def made(function: Callable[..., ToolOutput]) -> PlatformTool:
        arguments = _arguments_of(function)
        return PlatformTool(
            name=name or function.__name__,
            description=(inspect.getdoc(function) or "").partition("\n")[0],
            parameters=_flat_schema(arguments),
            writes=writes,
            run=function,
            arguments=arguments,
        )

    return made


def _arguments_of(function: Callable[..., Any]) -> type[msgspec.Struct]:
    hints = typing.get_type_hints(function)
    fields: list[Any] = []
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        if parameter.default is inspect.Parameter.empty:
            fields.append((name, hints[name]))
        else:
            fields.append((name, hints[name], parameter.default))
    return msgspec.defstruct(function.__name__, fields, kw_only=True)


def _flat_schema(arguments: type[msgspec.Struct]) -> ArgumentsSchema:
    """Returns a schema as MCP and OpenAI accept it: no references, no title, without `null` for optional arguments."""
    (schema,), components = msgspec.json.schema_components([arguments], ref_template="{name}")
    own = components[schema["$ref"]]
    properties = {name: _plain(value) for name, value in own.get("properties", {}).items()}
    return {"type": "object", "properties": properties, "required": own.get("required", [])}


def _plain(schema: JsonObject) -> JsonObject:
    branches = [branch for branch in schema.get("anyOf", []) if branch.get("type") != "null"]
    found = dict(branches[0]) if branches else {k: v for k, v in schema.items() if k != "default"}
    if "enum" in found and None in found["enum"]:
        found["enum"] = [value for value in found["enum"] if value is not None]
    if "enum" in found and "type" not in found:
        found["type"] = "string"
    return found


def _type_name(schema: JsonObject) -> str:
    if "enum" in schema:
        return "|".join(str(value) for value in schema["enum"])
    return f"{schema['items'].get('type', 'any')}[]" if schema.get("type") == "array" else schema.get("type", "any")


def _error_text(problem: str) -> str:
    """Returns msgspec's text, without its dollar signs."""
    return problem.replace("`$.", "`").replace("`", "").replace("Object missing required field", "missing argument")


def _kind(value: object) -> str:
    return "null" if value is None else {str: "a string", list: "a list"}.get(type(value), type(value).__name__)
