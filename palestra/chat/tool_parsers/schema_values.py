"""Converts values that a model wrote as plain text to the types of a tool's JSON schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from palestra.chat.tool_calls import read_json
from palestra.util.json_types import JsonMapping

STRING = frozenset({"string"})
PYTHON = {"True": True, "False": False, "None": None, "null": None}
"""Scalars as Python writes them, which some models learned from their templates; `read_json` does not return null."""
MAX_HOPS = 32  # nested references and alternatives; only a cycle has more


def function_of(tool: JsonMapping) -> JsonMapping:
    return tool.get("function", tool)


def parameters_of(tools: Sequence[JsonMapping], name: str) -> JsonMapping:
    """Returns the schema of a tool's arguments; empty for an unknown tool."""
    for tool in tools:
        if function_of(tool).get("name") == name:
            return function_of(tool).get("parameters") or {}
    return {}


def property_of(parameters: JsonMapping, key: str) -> JsonMapping:
    """Returns the schema of one argument; empty if the tool does not describe it."""
    root = resolved(parameters, parameters)
    found = (root.get("properties") or {}).get(key, root.get("additionalProperties"))
    return found if isinstance(found, Mapping) else {}


def typed(text: str, schema: JsonMapping, root: JsonMapping) -> object:
    """Converts a value. If only strings are allowed it stays text; otherwise it is parsed as JSON, if the schema allows
    the result."""
    types, options = types_of(schema, root), options_of(schema, root)
    if types == STRING or text in options:
        return text
    value = PYTHON[text.strip()] if text.strip() in PYTHON else read_json(text)
    if (value is None and text.strip() not in PYTHON) or isinstance(value, str):
        return text
    return value if types is None or _kinds(value) & types else text


def types_of(schema: JsonMapping, root: JsonMapping, hops: int = 0) -> frozenset[str] | None:
    """Returns the names of the allowed JSON types; None: any."""
    schema = resolved(schema, root)
    if options := options_of(schema, root):
        return _union(_kinds(option) for option in options)
    if (named := schema.get("type")) is not None:
        names = frozenset([named] if isinstance(named, str) else named)
        return names | {"null"} if schema.get("nullable") is True else names
    for key in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(key)
        if isinstance(inner, list) and inner and hops < MAX_HOPS:
            return _union(types_of(one, root, hops + 1) for one in inner if isinstance(one, Mapping))
    return None


def options_of(schema: JsonMapping, root: JsonMapping) -> list[object]:
    """Returns the values that the schema enumerates; empty if it has no enumeration."""
    schema = resolved(schema, root)
    listed = schema.get("enum")
    return [schema["const"]] if "const" in schema else listed if isinstance(listed, list) else []


def resolved(schema: JsonMapping, root: JsonMapping) -> JsonMapping:
    """Returns the schema that its `$ref` points at, in the same document."""
    for _ in range(MAX_HOPS):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        found: object = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) and part else found
        schema = found if isinstance(found, Mapping) and found is not schema else {}
    return {}


def _union(parts: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    known = list(parts)
    return None if None in known else frozenset[str]().union(*(part for part in known if part is not None))


def _kinds(value: object) -> frozenset[str]:
    """Returns the JSON types of a value."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value.is_integer() else {"number"})
        case str():
            return STRING
        case list():
            return frozenset({"array"})
        case _:
            return frozenset({"object"})
