"""Forms made from the JSON Schema of a tool's arguments, and what a browser sends of them as arguments."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from palestra.environments.platform.tool_schemas import ArgumentsSchema
from palestra.util.json_types import JsonObject, JsonPayload

LONG_TEXT = frozenset({"body", "text", "content", "description", "comment", "message", "note", "notes"})
"""Names of arguments that are written in more than one line."""


class FormField(Struct, frozen=True):
    name: str
    kind: str
    """choice, number, lines (one value each), json, long (text of several lines) or text."""
    is_required: bool
    choices: list[str] = []
    hint: str = ""
    about: str = ""


def form_fields(parameters: ArgumentsSchema) -> list[FormField]:
    required = parameters["required"]
    return [_field(name, schema, name in required) for name, schema in parameters["properties"].items()]


def read_arguments(parameters: ArgumentsSchema, form: Mapping[str, str]) -> JsonPayload:
    """The arguments of a call from the fields of a form. A field that is empty is left out, unless it must be there."""
    found: dict[str, object] = {}
    for field in form_fields(parameters):
        text = form.get(field.name, "")
        if text or field.is_required:
            found[field.name] = _value(field, text)
    return found


def _field(name: str, schema: JsonObject, is_required: bool) -> FormField:
    about = str(schema.get("description") or "")
    if "enum" in schema:
        return FormField(name, "choice", is_required, [str(one) for one in schema["enum"]], about=about)
    match schema.get("type"):
        case "boolean":
            return FormField(name, "choice", is_required, ["true", "false"], about=about)
        case "integer" | "number" as kind:
            return FormField(name, "number", is_required, hint=kind, about=about)
        case "array" if (schema.get("items") or {}).get("type") == "string":
            return FormField(name, "lines", is_required, hint="one in each line", about=about)
        case "string":
            return FormField(name, "long" if name in LONG_TEXT else "text", is_required, about=about)
    return FormField(name, "json", is_required, hint="JSON", about=about)


def _value(field: FormField, text: str) -> object:
    match field.kind:
        case "lines":
            return [line.strip() for line in text.splitlines() if line.strip()]
        case "number" | "json":
            return _parsed(text)
        case "choice" if field.choices == ["true", "false"]:
            return _parsed(text)
    return text.replace("\r\n", "\n")


def _parsed(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text  # the tool reports what is wrong with it
