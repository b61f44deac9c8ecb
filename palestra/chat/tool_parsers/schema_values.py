"""Values that a model wrote as plain text, with the types that a tool's JSON schema says.

Owns: which types a schema allows, what a text means under them. Never touches: how a call is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from palestra.chat.tool_calls import read_json
from palestra.util.json_types import JsonMapping

STRING = frozenset({"string"})
PYTHON = {"True": True, "False": False, "None": None, "null": None}
"""Scalars as Python writes them, which some models learned from their templates; `read_json` has no null."""
MAX_HOPS = 32  # references and alternatives within each other; only a circle has more


def function_of(tool: JsonMapping) -> JsonMapping:
    return tool.get("function", tool)


def parameters_of(tools: Sequence[JsonMapping], name: str) -> JsonMapping:
    """Schema of a tool's arguments; empty for a tool that nobody offered."""
    for tool in tools:
        if function_of(tool).get("name") == name:
            return function_of(tool).get("parameters") or {}
    return {}


def property_of(parameters: JsonMapping, key: str) -> JsonMapping:
    """Schema of one argument; empty where the tool says nothing about it."""
    root = resolved(parameters, parameters)
    found = (root.get("properties") or {}).get(key, root.get("additionalProperties"))
    return found if isinstance(found, Mapping) else {}


def typed(text: str, schema: JsonMapping, root: JsonMapping) -> object:
    """Text stays text where only strings are allowed. Else it is the JSON it reads as, if the schema allows that."""
    types, options = types_of(schema, root), options_of(schema, root)
    if types == STRING or text in options:
        return text
    value = PYTHON[text.strip()] if text.strip() in PYTHON else read_json(text)
    if (value is None and text.strip() not in PYTHON) or isinstance(value, str):
        return text
    return value if types is None or _kinds(value) & types else text


def types_of(schema: JsonMapping, root: JsonMapping, hops: int = 0) -> frozenset[str] | None:
    """Names of JSON types; None: any."""
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
    """The values that it lists; empty where it lists none."""
    schema = resolved(schema, root)
    listed = schema.get("enum")
    return [schema["const"]] if "const" in schema else listed if isinstance(listed, list) else []


def resolved(schema: JsonMapping, root: JsonMapping) -> JsonMapping:
    """What its `$ref` points at, in the same document."""
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
    """The types that a value is of."""
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
